"""Attention timed against its peers: `attention` has the cases, `turns` times them, `report` shows them, `app` is the command."""
