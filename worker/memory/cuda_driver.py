"""CUDA driver calls that torch does not offer: virtual memory, page-locking of shared memory, batches of copies.

The only module that imports cuda-python (the extra `cuda`). All calls may come from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from contracts.errors import UpbeatError
from runtime import telemetry

log = telemetry.logger("worker.cuda")
_PORTABLE, _READ_ONLY = 0x01, 0x08  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY
_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
#: Held while a graph is captured, and during calls of other threads that would make it invalid.
CAPTURING = threading.RLock()
#: Which driver's context a thread has entered last.
_thread = threading.local()


class CudaError(UpbeatError):
    """The driver refused a call; the message has the call and the error."""


class VirtualMemory(Protocol):
    """Physical memory by handle, and reserved address ranges that map it. Sizes and addresses are multiples of
    `granularity_bytes`."""

    granularity_bytes: int

    def reserve(self, bytes_: int) -> int:
        """Reserves an address range and returns its address."""
        ...

    def free(self, address: int, bytes_: int) -> None:
        """Releases a range that maps nothing."""
        ...

    def create(self, bytes_: int) -> int:
        """Allocates physical memory with undefined content and returns its handle."""
        ...

    def release(self, handle: int) -> None:
        """Frees the memory of a handle that is mapped nowhere."""
        ...

    def export(self, handle: int) -> int:
        """A file descriptor with which another process can `adopt` the memory; the caller closes it."""
        ...

    def adopt(self, file: int) -> int:
        """A handle to memory that another process exported; release it like others."""
        ...

    def map(self, address: int, bytes_: int, handle: int) -> None:
        """Maps all of `handle` at `address`; accessible after `allow`."""
        ...

    def allow(self, address: int, bytes_: int) -> None:
        """Lets the device read and write a fully mapped range."""
        ...

    def unmap(self, address: int, bytes_: int) -> None:
        """Undoes every `map` within the range, which holds whole ones without gaps."""
        ...

    def zero(self, address: int, bytes_: int) -> None:
        """Fills mapped memory with zeros; complete when it returns."""
        ...

    def settle(self) -> None:
        """Returns when the device is idle."""
        ...


class CudaDriver:
    """The driver for CUDA device `index`, in torch's context. Implements `VirtualMemory`."""

    def __init__(self, index: int = 0) -> None:
        """Raises CudaError; ImportError without cuda-python."""
        from cuda.bindings import driver

        self._driver: Any = driver
        self._index = index
        self._call(driver.cuInit(0), "cuInit")
        self._device = device = self._call(driver.cuDeviceGet(index), "cuDeviceGet")
        self._context = self._call(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        location = driver.CUmemLocation()
        location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index
        self._kind = driver.CUmemAllocationProp()
        self._kind.type, self._kind.location = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, location
        self._exports = self._exportable(device)
        if self._exports:
            self._kind.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._access = driver.CUmemAccessDesc()
        self._access.location, self._access.flags = (
            location,
            driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        )
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call(
            driver.cuMemGetAllocationGranularity(self._kind, least), "cuMemGetAllocationGranularity"
        )
        self.granularity_bytes = int(granularity)
        self._batches = hasattr(driver, "cuMemcpyBatchAsync")

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        free, total = self._call(self._at().cuMemGetInfo(), "cuMemGetInfo")
        return int(free), int(total)

    # ---- virtual memory ----------------------------------------------------------------------------------------
    def reserve(self, bytes_: int) -> int:
        """See `VirtualMemory.reserve`."""
        return int(self._call(self._at().cuMemAddressReserve(bytes_, 0, 0, 0), "cuMemAddressReserve"))

    def free(self, address: int, bytes_: int) -> None:
        """See `VirtualMemory.free`."""
        self._call(self._at().cuMemAddressFree(address, bytes_), "cuMemAddressFree")

    def create(self, bytes_: int) -> int:
        """See `VirtualMemory.create`."""
        return int(self._call(self._at().cuMemCreate(bytes_, self._kind, 0), "cuMemCreate"))

    def release(self, handle: int) -> None:
        """See `VirtualMemory.release`."""
        self._call(self._at().cuMemRelease(handle), "cuMemRelease")

    def export(self, handle: int) -> int:
        """See `VirtualMemory.export`. Raises CudaError if the device does not support it."""
        if not self._exports:
            raise CudaError(
                "this device's driver gives no file descriptors of its memory; nothing can be lent to another process"
            )
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self._call(self._at().cuMemExportToShareableHandle(handle, kind, 0), "cuMemExportToShareableHandle"))

    def adopt(self, file: int) -> int:
        """See `VirtualMemory.adopt`."""
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self._call(self._at().cuMemImportFromShareableHandle(file, kind), "cuMemImportFromShareableHandle"))

    def _exportable(self, device: Any) -> bool:
        asked = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        return bool(self._call(self._driver.cuDeviceGetAttribute(asked, device), "cuDeviceGetAttribute"))

    def map(self, address: int, bytes_: int, handle: int) -> None:
        """See `VirtualMemory.map`."""
        with CAPTURING:
            self._call(self._at().cuMemMap(address, bytes_, 0, handle, 0), "cuMemMap")

    def allow(self, address: int, bytes_: int) -> None:
        """See `VirtualMemory.allow`."""
        with CAPTURING:
            self._call(self._at().cuMemSetAccess(address, bytes_, [self._access], 1), "cuMemSetAccess")

    def unmap(self, address: int, bytes_: int) -> None:
        """See `VirtualMemory.unmap`."""
        with CAPTURING:
            self._call(self._at().cuMemUnmap(address, bytes_), "cuMemUnmap")

    def zero(self, address: int, bytes_: int) -> None:
        """See `VirtualMemory.zero`."""
        driver = self._at()
        self._call(driver.cuMemsetD8(address, 0, bytes_), "cuMemsetD8")
        self._call(driver.cuStreamSynchronize(0), "cuStreamSynchronize")  # torch's streams do not wait for this one

    def settle(self) -> None:
        """See `VirtualMemory.settle`."""
        with CAPTURING:
            self._call(self._at().cuCtxSynchronize(), "cuCtxSynchronize")

    # ---- copies ------------------------------------------------------------------------------------------------
    def register(self, address: int, bytes_: int, *, read_only: bool = False) -> None:
        """Page-locks host memory, so that copies to and from it are asynchronous. read_only: it is mapped for reading
        only."""
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        self._call(self._at().cuMemHostRegister(address, bytes_, flags), "cuMemHostRegister")

    def unregister(self, address: int) -> None:
        """Undoes `register`."""
        self._call(self._at().cuMemHostUnregister(address), "cuMemHostUnregister")

    def copy(self, to: Sequence[int], source: Sequence[int], bytes_: int, stream: int) -> None:
        """Queues copies of `bytes_` each on `stream`, which is not the default one; in one call from CUDA 12.8 on."""
        if not to:
            return
        driver = self._at()
        if self._batches:
            ends = ([driver.CUdeviceptr(address) for address in addresses] for addresses in (to, source))
            result = driver.cuMemcpyBatchAsync(*ends, [bytes_] * len(to), len(to), [self._in_order()], [0], 1, stream)
            if not int(result[0]):
                return
            self._batches = False
            log.warning("copies are queued one by one", cuMemcpyBatchAsync=str(result[0]))
        for a, b in zip(to, source, strict=True):
            self._call(driver.cuMemcpyAsync(a, b, bytes_, stream), "cuMemcpyAsync")

    # ---- other devices -----------------------------------------------------------------------------------------
    def allocate(self, bytes_: int) -> int:
        """Allocates plain memory, which other devices may copy from, and returns its address. Raises CudaError."""
        return int(self._call(self._at().cuMemAlloc(bytes_), "cuMemAlloc"))

    def deallocate(self, address: int) -> None:
        """Frees what `allocate` returned; nothing uses it any more."""
        self._call(self._at().cuMemFree(address), "cuMemFree")

    def reach(self, peer: CudaDriver) -> bool:
        """Lets this device read plain memory of `peer`'s device directly. False: the hardware does not."""
        if peer._index == self._index:
            return True
        driver = self._at()
        if not self._call(driver.cuDeviceCanAccessPeer(self._device, peer._device), "cuDeviceCanAccessPeer"):
            return False
        result = driver.cuCtxEnablePeerAccess(peer._context, 0)
        if int(result[0]) != _ENABLED:
            self._call(result, "cuCtxEnablePeerAccess")
        return True

    def copy_from(self, peer: CudaDriver, to: int, source: int, bytes_: int, stream: int) -> None:
        """Queues a copy from plain memory of `peer`'s device on `stream`, which is one of this device."""
        ends = to, self._context, source, peer._context
        self._call(self._at().cuMemcpyPeerAsync(*ends, bytes_, stream), "cuMemcpyPeerAsync")

    def _in_order(self) -> Any:
        attributes = self._driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = self._driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        return attributes

    def _at(self) -> Any:
        """The driver, after entering the device's context on this thread, which torch leaves as it finds it."""
        if getattr(_thread, "entered", None) is not self:
            self._call(self._driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")
            _thread.entered = self
        return self._driver

    def _call(self, result: tuple[Any, ...], name: str) -> Any:
        if int(result[0]):
            raise CudaError(f"{name}: {result[0]}")
        return result[1] if len(result) == 2 else result[1:]
