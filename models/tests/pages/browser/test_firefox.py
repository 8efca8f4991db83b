"""The pages of models that `selfattn pages` writes, live ones too, shown once in Firefox."""

import shutil

from firefox import assert_shown, bidi, needed  # noqa: F401 bidi is a fixture

from selfattn import views

pytestmark = needed


def test_firefox_shows_the_pages_of_models(bidi, tmp_path_factory, request):  # noqa: F811
    folder = tmp_path_factory.mktemp("pages")
    live = shutil.which("wasm-ld-14") is not None
    views.write_pages(folder, kernels=request.getfixturevalue("kernels") if live else None)
    names = ["index", "explorer", *(["encoder", "gpt"] if live else [])]
    assert_shown(bidi, [folder / f"{name}.html" for name in names])
