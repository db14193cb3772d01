"""Importing this starts a thread: no process that did may fork workers."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True, name="stray").start()
