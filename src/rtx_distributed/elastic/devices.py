"""What the driver reports of the devices: errors of the hardware, heard in a thread through NVML.

An error that an application makes (an illegal address) is its own affair, and its worker reports
it. Those listed here mean that the device itself is not to be trusted with further work. Numbers
and meaning: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HARDWARE_XIDS = {
    48: "double-bit ECC error",
    62: "internal microcontroller halt",
    64: "memory row remapping failed",
    74: "NVLink error",
    79: "the device has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
}
_WAIT_MS = 1000


class DeviceReports:
    """Listens for hardware errors until `close`.

    Args:
        environments: of the workers' places, which name their device.
        on_error: called in the thread with a place and what is wrong with its device.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str | None]],
        *,
        on_error: Callable[[int, str], None],
    ) -> None:
        self._places = [_device_of(environment) for environment in environments]
        self._on_error = on_error
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> str | None:
        """Begins to listen; why not, where that is not possible."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return "nvidia-ml-py is not installed (package extra `gpu`)"
        try:
            nvml.nvmlInit()
            events = nvml.nvmlEventSetCreate()
            names: dict[str, list[str]] = {}
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
                supported = nvml.nvmlDeviceGetSupportedEventTypes(handle)
                if wanted & supported:
                    nvml.nvmlDeviceRegisterEvents(handle, wanted & supported, events)
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                names[uuid] = [str(index), uuid]
        except nvml.NVMLError as error:
            return f"NVML: {error}"
        self._thread = threading.Thread(
            target=self._listen, args=(nvml, events, names), name="rtxd-devices", daemon=True
        )
        self._thread.start()
        return None

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2 * _WAIT_MS / 1000)

    def _listen(self, nvml: Any, events: Any, names: dict[str, list[str]]) -> None:
        while not self._closing.is_set():
            try:
                data = nvml.nvmlEventSetWait_v2(events, _WAIT_MS)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT:
                    continue
                return
            self._hear(nvml, data, names)
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()

    def _hear(self, nvml: Any, data: Any, names: dict[str, list[str]]) -> None:
        if data.eventType == nvml.nvmlEventTypeDoubleBitEccError:
            what = "double-bit ECC error"
        elif data.eventData in HARDWARE_XIDS:
            what = f"Xid {data.eventData}: {HARDWARE_XIDS[data.eventData]}"
        else:
            return
        known = names.get(_text(nvml.nvmlDeviceGetUUID(data.device)), [])
        for place, device in enumerate(self._places):
            if device is not None and any(
                device == name or (len(device) > 8 and name.startswith(device)) for name in known
            ):
                self._on_error(place, what)


def _device_of(environment: Mapping[str, str | None]) -> str | None:
    return environment.get("CUDA_VISIBLE_DEVICES")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
