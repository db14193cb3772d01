"""``python -m rtx_distributed``: the command ``rtxd`` of this very interpreter."""

from __future__ import annotations

from rtx_distributed.cli import main

if __name__ == "__main__":
    main()
