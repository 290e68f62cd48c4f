"""The report of a comparison: pictures with titles, units and legends, and one page that needs nothing but itself."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from kvframe.cli import main
from kvframe.report import figure_class
