"""What a run gave, for machines (json.py), in the terminal (table.py), as a page (html.py), in the docs (matrix.py)."""
