"""Test the page of the settings matrix against its records."""

import subprocess
import sys

from connector_tax.config import ROOT


def test_page_has_the_tables_of_its_records() -> None:
    command = [sys.executable, str(ROOT / "docs" / "settings_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
