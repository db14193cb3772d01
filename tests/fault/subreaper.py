"""Importing this makes the importing process a subreaper, like an init between two processes."""

from rtx_distributed.elastic.processes import become_subreaper

become_subreaper()
