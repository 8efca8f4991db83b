"""Attention timed against its peers: what `attention` names is timed in `turns` and shown by `report`; `app` is the command."""
