// Memory that is created, shared, reserved for and mapped apart.
#define _GNU_SOURCE

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "stub.h"

static Allocation allocations[kMaxObjects];  // handle: index + 1
static Range ranges[kMaxObjects];

static size_t granularity(void) { return (size_t)setting("STUB_CUDA_GRANULARITY", 2 << 20); }

void count_memory(int64_t* memory, int64_t* addresses) {
  for (int i = 0; i < kMaxObjects; ++i) {
    *memory += allocations[i].size != 0;
    *addresses += ranges[i].size != 0;
  }
}

static int check_properties(const char* call, const AllocationProperties* wanted) {
  if (wanted->type != kPinned) return complain(kInvalidValue, "%s: type %d", call, wanted->type);
  if (wanted->location.type != kDeviceLocation) {
    return complain(kInvalidValue, "%s: location type %d", call, wanted->location.type);
  }
  if (wanted->location.id < 0 || wanted->location.id >= devices()) {
    return complain(kInvalidDevice, "%s: device %d", call, wanted->location.id);
  }
  if ((wanted->handle_types & ~kPosixFd) != 0) {
    return complain(kNotSupported, "%s: handle types %d", call, wanted->handle_types);
  }
  if (wanted->compression > 1 || wanted->rdma_capable > 1 || wanted->win32 != NULL) {
    return complain(kInvalidValue, "%s: flags", call);
  }
  return kSuccess;
}

int cuMemGetAllocationGranularity(size_t* size, const AllocationProperties* wanted, int option) {
  if (!initialized()) return kNotInitialized;
  if (option != 0 && option != 1) return kInvalidValue;
  const int result = check_properties("cuMemGetAllocationGranularity", wanted);
  *size = granularity();
  return result;
}

static Allocation* new_allocation(int fd, int device, size_t size, uint64_t* handle) {
  for (int i = 0; i < kMaxObjects; ++i) {
    if (allocations[i].size != 0) continue;
    allocations[i] = (Allocation){.fd = fd, .device = device, .handles = 1, .size = size};
    *handle = (uint64_t)i + 1;
    return &allocations[i];
  }
  return NULL;
}

static Allocation* of_handle(uint64_t handle) {
  if (handle == 0 || handle > kMaxObjects) return NULL;
  Allocation* one = &allocations[handle - 1];
  return one->size != 0 && one->handles > 0 ? one : NULL;
}

static void drop_unused(Allocation* one) {
  if (one->handles > 0 || one->mappings > 0) return;
  close(one->fd);
  one->size = 0;
}

static int64_t used_bytes(int device) {
  int64_t used = 0;
  for (int i = 0; i < kMaxObjects; ++i) {
    const Allocation* one = &allocations[i];
    if (one->size != 0 && !one->imported && one->device == device) used += (int64_t)one->size;
  }
  return used;
}

int cuMemCreate(uint64_t* handle, size_t size, const AllocationProperties* wanted, uint64_t flags) {
  if (!initialized()) return kNotInitialized;
  const int result = check_properties("cuMemCreate", wanted);
  if (result != kSuccess) return result;
  if (size == 0 || size % granularity() != 0 || flags != 0) {
    return complain(kInvalidValue, "cuMemCreate: %zu bytes are no multiple of the granularity %zu",
                    size, granularity());
  }
  const int device = wanted->location.id;
  int code = kOutOfMemory;
  lock();
  if (used_bytes(device) + (int64_t)size <= setting("STUB_CUDA_MEMORY", INT64_C(8) << 30)) {
    char name[64];
    snprintf(name, sizeof name, "stub-cuda:%d:%d", device, wanted->rdma_capable);
    const int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)size) == 0) {
      new_allocation(fd, device, size, handle)->shareable = wanted->handle_types == kPosixFd;
      code = kSuccess;
    }
  }
  unlock();
  return code;
}

int cuMemExportToShareableHandle(int* shared, uint64_t handle, int type, uint64_t flags) {
  lock();
  const Allocation* one = of_handle(handle);
  int code = kInvalidValue;
  if (one == NULL) {
    complain(0, "cuMemExportToShareableHandle: no handle %llu", (unsigned long long)handle);
  } else if (!one->shareable || type != kPosixFd || flags != 0) {
    complain(0, "cuMemExportToShareableHandle: the memory was not created for handle type %d", type);
  } else if ((*shared = fcntl(one->fd, F_DUPFD_CLOEXEC, 0)) >= 0) {
    code = kSuccess;
  }
  unlock();
  return code;
}

int cuMemImportFromShareableHandle(uint64_t* handle, void* shared, int type) {
  if (!initialized()) return kNotInitialized;
  const int fd = (int)(intptr_t)shared;
  char path[64], target[256];
  int device = -1, capable = 0;
  struct stat status;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(path, target, sizeof target - 1);
  target[length > 0 ? length : 0] = 0;
  if (type != kPosixFd || sscanf(target, "/memfd:stub-cuda:%d:%d", &device, &capable) != 2 ||
      device >= devices() || fstat(fd, &status) != 0) {
    return kInvalidValue;  // not of this driver: a caller may be handed anything
  }
  lock();
  Allocation* one = new_allocation(fcntl(fd, F_DUPFD_CLOEXEC, 0), device, (size_t)status.st_size, handle);
  one->imported = true;
  unlock();
  return kSuccess;
}

int cuMemRelease(uint64_t handle) {
  lock();
  Allocation* one = of_handle(handle);
  if (one != NULL) {
    --one->handles;
    drop_unused(one);
  }
  unlock();
  return one != NULL ? kSuccess
                     : complain(kInvalidValue, "cuMemRelease: %llu is no handle (any more)",
                                (unsigned long long)handle);
}

// ---- addresses

int cuMemAddressReserve(uintptr_t* address, size_t size, size_t alignment, uintptr_t hint,
                        uint64_t flags) {
  if (!initialized()) return kNotInitialized;
  const size_t unit = granularity();
  if (size == 0 || size % unit != 0 || alignment % unit != 0 || hint != 0 || flags != 0) {
    return complain(kInvalidValue, "cuMemAddressReserve: %zu bytes are no multiple of the granularity %zu", size, unit);
  }
  uint8_t* room = mmap(NULL, size + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return kOutOfMemory;
  uint8_t* start = (uint8_t*)(((uintptr_t)room + unit - 1) / unit * unit);
  if (start > room) munmap(room, (size_t)(start - room));
  if (start < room + unit) munmap(start + size, (size_t)(room + unit - start));
  int code = kOutOfMemory;
  lock();
  for (int i = 0; i < kMaxObjects && code != kSuccess; ++i) {
    if (ranges[i].size != 0) continue;
    ranges[i] = (Range){.address = (uintptr_t)start, .size = size, .allocation = -1};
    *address = (uintptr_t)start;
    code = kSuccess;
  }
  unlock();
  return code;
}

static Range* find_range(uintptr_t address, size_t size) {
  for (int i = 0; i < kMaxObjects; ++i) {
    Range* one = &ranges[i];
    if (one->size != 0 && address >= one->address && address + size <= one->address + one->size) {
      return one;
    }
  }
  return NULL;
}

// The whole range, or null and a violation.
static Range* whole(const char* call, uintptr_t address, size_t size, bool mapped) {
  Range* one = find_range(address, size);
  if (one != NULL && one->address == address && one->size == size &&
      (one->allocation >= 0) == mapped) {
    return one;
  }
  complain(0, "%s: %zu bytes at %#zx are not %s", call, size, (size_t)address,
           mapped ? "mapped" : "reserved and unmapped");
  return NULL;
}

int cuMemAddressFree(uintptr_t address, size_t size) {
  lock();
  Range* one = whole("cuMemAddressFree", address, size, false);
  if (one != NULL) {
    munmap((void*)address, size);
    one->size = 0;
  }
  unlock();
  return one != NULL ? kSuccess : kInvalidValue;
}

int cuMemMap(uintptr_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  int code = kInvalidValue;
  lock();
  Allocation* memory = of_handle(handle);
  Range* range = whole("cuMemMap", address, size, false);
  if (memory == NULL) {
    complain(0, "cuMemMap: no handle %llu", (unsigned long long)handle);
  } else if (offset != 0 || flags != 0 || size != memory->size) {
    complain(0, "cuMemMap: %zu bytes of memory of %zu", size, memory->size);
  } else if (range != NULL) {
    // Nobody may touch it before cuMemSetAccess; the stub itself has another way in.
    mmap((void*)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0);
    range->backing = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
    range->allocation = (int)(memory - allocations);
    range->device_access = false;
    ++memory->mappings;
    code = kSuccess;
  }
  unlock();
  return code;
}

int cuMemUnmap(uintptr_t address, size_t size) {
  lock();
  Range* one = whole("cuMemUnmap", address, size, true);
  if (one != NULL) {
    munmap(one->backing, size);
    mmap((void*)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    Allocation* memory = &allocations[one->allocation];
    one->allocation = -1;
    --memory->mappings;
    drop_unused(memory);
  }
  unlock();
  return one != NULL ? kSuccess : kInvalidValue;
}

static int give_access(Range* range, const Access* access) {
  if (access->flags != kReadWrite) {
    return complain(kInvalidValue, "cuMemSetAccess: flags %d", access->flags);
  }
  if (access->location.type == kHostLocation) {
    // A driver may refuse: most GPUs' memory cannot be reached by a CPU.
    if (setting("STUB_CUDA_HOST_ACCESS", 1) == 0) return kNotSupported;
    mprotect((void*)range->address, range->size, PROT_READ | PROT_WRITE);
    return kSuccess;
  }
  if (access->location.type != kDeviceLocation ||
      access->location.id != allocations[range->allocation].device) {
    return complain(kInvalidDevice, "cuMemSetAccess: device %d for memory of device %d",
                    access->location.id, allocations[range->allocation].device);
  }
  range->device_access = true;
  return kSuccess;
}

int cuMemSetAccess(uintptr_t address, size_t size, const Access* access, size_t count) {
  lock();
  Range* one = whole("cuMemSetAccess", address, size, true);
  int code = one != NULL && count > 0 ? kSuccess : kInvalidValue;
  for (size_t i = 0; i < count && code == kSuccess; ++i) code = give_access(one, &access[i]);
  unlock();
  return code;
}

uint8_t* device_bytes(uintptr_t address, size_t size) {
  const Range* range = find_range(address, size);
  if (range == NULL || range->allocation < 0) {
    complain(0, "%zu bytes at %#zx are no memory of a device", size, (size_t)address);
    return NULL;
  }
  if (!range->device_access) {
    complain(0, "%zu bytes at %#zx: cuMemSetAccess has not given access", size, (size_t)address);
    return NULL;
  }
  return range->backing + (address - range->address);
}

int cuMemGetHandleForAddressRange(int* shared, uintptr_t address, size_t size, int type,
                                  uint64_t flags) {
  if (type != 1 || flags != 0) return kInvalidValue;
  if (setting("STUB_CUDA_DMA_BUF", 1) == 0) return kNotSupported;
  int code = kInvalidValue;
  lock();
  const Range* one = whole("cuMemGetHandleForAddressRange", address, size, true);
  if (one != NULL && device_bytes(address, size) != NULL) {
    *shared = fcntl(allocations[one->allocation].fd, F_DUPFD_CLOEXEC, 0);
    code = kSuccess;
  }
  unlock();
  return code;
}

// ---- how cuda-python finds all this

int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                        int* status) {
  (void)version;
  (void)flags;
  char later[128];
  snprintf(later, sizeof later, "%s_v2", name);
  Dl_info own, found;
  dladdr((void*)cuGetProcAddress_v2, &own);
  // Only what is ours: another library of the process may have a function of this name.
  void* self = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = dlsym(self, later);
  if (*function == NULL) *function = dlsym(self, name);
  if (*function != NULL && (dladdr(*function, &found) == 0 || found.dli_fbase != own.dli_fbase)) {
    *function = NULL;
  }
  dlclose(self);
  if (status != NULL) *status = *function != NULL ? 0 : 1;
  return *function != NULL ? kSuccess : kNotFound;
}
