"""Every page that `selfattn pages` writes, live ones too, shown once in Firefox."""

import shutil

from firefox import assert_shown, bidi, needed  # noqa: F401 bidi is a fixture

from selfattn import views

pytestmark = needed


def test_firefox_shows_every_page(bidi, tmp_path_factory, request):  # noqa: F811
    folder = tmp_path_factory.mktemp("pages")
    views.write_pages(
        folder, kernels=request.getfixturevalue("kernels") if shutil.which("wasm-ld-14") else None
    )
    assert_shown(bidi, sorted(folder.iterdir()))
