"""``python -m benchmarks`` in a checkout, ``python -m selfattn.benchmarks`` once installed."""

from .app import main

raise SystemExit(main())
