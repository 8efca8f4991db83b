"""``python -m selfattn`` is the script ``selfattn``."""

from .cli import main

raise SystemExit(main())
