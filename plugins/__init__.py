"""The built-in strategies, installed as `kvframe_plugins`: one folder each."""
