"""``python -m selfattn.benchmarks`` is the command ``selfattn bench``."""

from .app import main

raise SystemExit(main())
