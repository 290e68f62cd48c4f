"""The configs of kvframe, installed as `kvframe.conf`. YAML files only."""
