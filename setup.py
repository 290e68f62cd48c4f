"""Package discovery: two folders of the repository are installed under other names.

    plugins/  -> kvframe_plugins    every folder in it that has an __init__.py
    conf/     -> kvframe.conf       every folder in it, for its YAML files

Everything else stands in pyproject.toml. A new plugin or config needs no edit here.
"""

from setuptools import find_namespace_packages, find_packages, setup

setup(
    packages=[
        *find_packages(include=["kvframe", "kvframe.*"]),
        "kvframe.conf",
        *(f"kvframe.conf.{name}" for name in find_namespace_packages("conf", exclude=["*__pycache__*"])),
        "kvframe_plugins",
        *(f"kvframe_plugins.{name}" for name in find_packages("plugins")),
    ],
    package_dir={"kvframe_plugins": "plugins", "kvframe.conf": "conf"},
    package_data={"": ["*.yaml", "*.md", "*.html"], "kvframe.scaffold": ["*/*"]},
)
