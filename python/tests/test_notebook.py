"""examples/notebook.ipynb, run from the first cell to the last by a real kernel. Skipped where none is installed."""

import importlib.util
import tempfile
import unittest
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
NEEDED = ("nbclient", "ipykernel", "matplotlib", "numpy")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@unittest.skipIf(MISSING, f"not installed: {', '.join(MISSING)}")
class Notebook(unittest.TestCase):
    def test_every_cell_runs_and_shows_something(self):
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbformat.validate(notebook)
        self.assertFalse(any(cell.get("outputs") for cell in notebook.cells), "the file holds no outputs")
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        shown = ["".join(str(output.get("text", output.get("data"))) for output in cell.outputs) for cell in cells]
        for cell, expected in zip(cells[1:], ("image/png", "probability", "recorded responses are right", "grpo: ")):
            self.assertIn(expected, shown[cells.index(cell)], cell.source)


if __name__ == "__main__":
    unittest.main()
