"""Commands of the program ``selfattn``, which finds them by the entry-point group ``selfattn.commands``."""
