"""Where the parts of the repository are."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DOCS, RECIPES, BENCHMARKS = ROOT / "docs", ROOT / "recipes", ROOT / "benchmarks"
