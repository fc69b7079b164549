// Start, devices, contexts, streams, host memory and copies; and how a test looks in.

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "stub.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool begun;
static char violations[16][256];
static int violation_count;
static int contexts[kMaxDevices];  // how often the primary context is retained
static _Thread_local int current = -1;
static HostRange registered[kMaxObjects];
static Copy copies[kMaxCopies];
static int copy_count;
static int64_t copied_bytes;
static int stream_count;

void lock(void) { pthread_mutex_lock(&mutex); }
void unlock(void) { pthread_mutex_unlock(&mutex); }
bool initialized(void) { return begun; }

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = getenv(name);
  return text != NULL ? atoll(text) : otherwise;
}

int devices(void) {
  const int64_t count = setting("STUB_CUDA_DEVICES", 2);
  return (int)(count < kMaxDevices ? count : kMaxDevices);
}

// A line into a file of this process in $STUB_CUDA_REPORT, at once: it may be killed.
__attribute__((format(printf, 1, 2))) static void tell(const char* format, ...) {
  const char* folder = getenv("STUB_CUDA_REPORT");
  if (folder == NULL) return;
  char path[4096];
  snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
  FILE* file = fopen(path, "a");
  if (file == NULL) return;
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fclose(file);
}

static void tell_process(void) {
  char line[2048] = "";
  FILE* command = fopen("/proc/self/cmdline", "r");
  if (command == NULL) return;
  const size_t length = fread(line, 1, sizeof line - 1, command);
  for (size_t i = 0; i < length; ++i) line[i] = line[i] != 0 ? line[i] : ' ';
  fclose(command);
  tell("process %s", line);
}

int complain(int result, const char* format, ...) {
  char line[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  tell("violation %s", line);
  if (violation_count < 16) strcpy(violations[violation_count++], line);
  return result;
}

static bool is_device(int device) { return device >= 0 && device < devices(); }

// ---- what tests read

const char* stub_violations(void) {
  static char text[16 * 260];
  text[0] = 0;
  for (int i = 0; i < violation_count; ++i) {
    strcat(text, violations[i]);
    strcat(text, "\n");
  }
  return text;
}

// Objects that are alive: memory, address ranges, registered host memory, contexts.
int64_t stub_live(const char* kind) {
  int64_t allocations = 0, ranges = 0, hosts = 0, retained = 0;
  lock();
  count_memory(&allocations, &ranges);
  for (int i = 0; i < kMaxObjects; ++i) hosts += registered[i].size != 0;
  for (int i = 0; i < kMaxDevices; ++i) retained += contexts[i];
  unlock();
  if (strcmp(kind, "memory") == 0) return allocations;
  if (strcmp(kind, "ranges") == 0) return ranges;
  if (strcmp(kind, "host") == 0) return hosts;
  if (strcmp(kind, "contexts") == 0) return retained;
  return strcmp(kind, "streams") == 0 ? stream_count : -1;
}

int64_t stub_copied_bytes(void) { return copied_bytes; }

// At the end of a process that ends by itself: what is left.
__attribute__((destructor)) static void report(void) {
  if (!begun) return;
  static const char* const kinds[] = {"memory", "ranges", "host", "contexts", "streams"};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; ++i) {
    tell("left %s %lld", kinds[i], (long long)stub_live(kinds[i]));
  }
  tell("copied %lld", (long long)copied_bytes);
}

// ---- devices

int cuInit(unsigned flags) {
  if (flags != 0) return kInvalidValue;
  if (devices() <= 0) return 100;  // CUDA_ERROR_NO_DEVICE
  if (!begun) tell_process();
  begun = true;
  return kSuccess;
}

int cuDriverGetVersion(int* version) {
  *version = 12090;
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  if (!begun) return kNotInitialized;
  *count = devices();
  return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  if (!begun) return kNotInitialized;
  if (!is_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

int cuDeviceGetName(char* name, int length, int device) {
  if (!is_device(device)) return kInvalidDevice;
  snprintf(name, (size_t)length, "stub GPU");
  return kSuccess;
}

int cuDeviceGetPCIBusId(char* text, int length, int device) {
  if (!is_device(device)) return kInvalidDevice;
  if (length < 13) return kInvalidValue;
  snprintf(text, (size_t)length, "0000:%02X:00.0", 0x1a + device);
  return kSuccess;
}

int cuDeviceGetByPCIBusId(int* device, const char* text) {
  char own[16];
  for (int i = 0; i < devices(); ++i) {
    cuDeviceGetPCIBusId(own, sizeof own, i);
    if (strcasecmp(own, text) == 0) {
      *device = i;
      return kSuccess;
    }
  }
  return kInvalidDevice;
}

int cuDeviceGetUuid_v2(char* uuid, int device) {
  if (!is_device(device)) return kInvalidDevice;
  for (int i = 0; i < 16; ++i) uuid[i] = (char)(0xa0 + i);
  uuid[15] = (char)device;
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (!is_device(device)) return kInvalidDevice;
  switch (attribute) {
    case 75:  // compute capability, major and minor
      *value = 9;
      return kSuccess;
    case 76:
      *value = 0;
      return kSuccess;
    case 102:  // virtual memory management
    case 103:  // POSIX descriptors of it
      *value = 1;
      return kSuccess;
    case 110:  // GPUDirect RDMA with it
    case 116:  // GPUDirect RDMA
      *value = (int)setting("STUB_CUDA_RDMA", 1);
      return kSuccess;
    case 124:  // dma-buf
      *value = (int)setting("STUB_CUDA_DMA_BUF", 1);
      return kSuccess;
    case 117:  // how what a NIC wrote can be flushed: 1 by the host
      *value = (int)setting("STUB_CUDA_FLUSH", 1);
      return kSuccess;
    case 118:  // for whom it needs no flush: 100 for the owner of the memory
      *value = (int)setting("STUB_CUDA_ORDERING", 100);
      return kSuccess;
    default:
      return complain(kInvalidValue, "cuDeviceGetAttribute: the stub has no attribute %d",
                      attribute);
  }
}

// ---- contexts and streams

int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (!begun) return kNotInitialized;
  if (!is_device(device)) return kInvalidDevice;
  lock();
  ++contexts[device];
  unlock();
  *context = &contexts[device];
  return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  if (!is_device(device)) return kInvalidDevice;
  lock();
  const bool retained = contexts[device] > 0;
  if (retained) --contexts[device];
  unlock();
  return retained ? kSuccess
                  : complain(kInvalidContext, "cuDevicePrimaryCtxRelease: %d is not retained", device);
}

int cuCtxSetCurrent(void* context) {
  if (context == NULL) {
    current = -1;
    return kSuccess;
  }
  for (int i = 0; i < devices(); ++i) {
    if (context == &contexts[i] && contexts[i] > 0) {
      current = i;
      return kSuccess;
    }
  }
  return complain(kInvalidContext, "cuCtxSetCurrent: no such context");
}

static bool in_context(const char* call) {
  const bool yes = current >= 0 && contexts[current] > 0;
  if (!yes) complain(0, "%s: no context is current", call);
  return yes;
}

int cuStreamCreate(void** stream, unsigned flags) {
  if (flags > 1) return kInvalidValue;
  if (!in_context("cuStreamCreate")) return kInvalidContext;
  lock();
  ++stream_count;
  unlock();
  *stream = malloc(1);
  return kSuccess;
}

static void run_copies(const void* stream) {
  int kept = 0;
  for (int i = 0; i < copy_count; ++i) {
    if (copies[i].stream == stream) {
      memcpy(copies[i].to, copies[i].from, copies[i].size);
    } else {
      copies[kept++] = copies[i];
    }
  }
  copy_count = kept;
}

int cuStreamDestroy_v2(void* stream) {
  lock();
  run_copies(stream);
  --stream_count;
  unlock();
  free(stream);
  return kSuccess;
}

int cuStreamSynchronize(void* stream) {
  if (!in_context("cuStreamSynchronize")) return kInvalidContext;
  lock();
  run_copies(stream);
  unlock();
  return kSuccess;
}

int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  if (!in_context("cuFlushGPUDirectRDMAWrites")) return kInvalidContext;
  if (target != 0 || (scope != 100 && scope != 200)) return kInvalidValue;
  tell("flushed");
  return kSuccess;
}

// ---- host memory and copies

static HostRange* find_host(uintptr_t address, size_t size) {
  for (int i = 0; i < kMaxObjects; ++i) {
    HostRange* one = &registered[i];
    if (one->size != 0 && address < one->address + one->size && one->address < address + size) {
      return one;
    }
  }
  return NULL;
}

int cuMemHostRegister_v2(void* data, size_t size, unsigned flags) {
  if (!in_context("cuMemHostRegister")) return kInvalidContext;
  if (data == NULL || size == 0 || flags > 15) {
    return complain(kInvalidValue, "cuMemHostRegister: %zu bytes, flags %u", size, flags);
  }
  int result = kOutOfMemory;
  lock();
  if (find_host((uintptr_t)data, size) != NULL) {
    result = complain(kHostMemoryRegistered, "cuMemHostRegister: registered already");
  } else {
    for (int i = 0; i < kMaxObjects && result != kSuccess; ++i) {
      if (registered[i].size != 0) continue;
      registered[i] = (HostRange){(uintptr_t)data, size};
      result = kSuccess;
    }
  }
  unlock();
  return result;
}

int cuMemHostUnregister(void* data) {
  lock();
  HostRange* one = find_host((uintptr_t)data, 1);
  const bool known = one != NULL && one->address == (uintptr_t)data;
  if (known) one->size = 0;
  unlock();
  return known ? kSuccess
               : complain(kHostMemoryNotRegistered, "cuMemHostUnregister: not registered");
}

int cuMemHostGetDevicePointer_v2(uintptr_t* address, void* data, unsigned flags) {
  if (flags != 0) return kInvalidValue;
  if (find_host((uintptr_t)data, 1) == NULL) return kInvalidValue;
  *address = (uintptr_t)data;
  return kSuccess;
}

static int copy(const char* call, void* host, uintptr_t device, size_t size, void* stream,
                bool to_host) {
  if (!in_context(call)) return kInvalidContext;
  int result = kInvalidValue;
  lock();
  uint8_t* bytes = device_bytes(device, size);
  const HostRange* pinned = find_host((uintptr_t)host, 1);
  if (pinned == NULL || (uintptr_t)host + size > pinned->address + pinned->size) {
    complain(0, "%s: host memory that is not registered", call);
  } else if (bytes != NULL) {
    if (copy_count == kMaxCopies) run_copies(copies[0].stream);
    copies[copy_count++] = to_host ? (Copy){host, stream, bytes, size}
                                   : (Copy){bytes, stream, host, size};
    copied_bytes += (int64_t)size;
    result = kSuccess;
  }
  unlock();
  return result;
}

int cuMemcpyDtoHAsync_v2(void* host, uintptr_t device, size_t size, void* stream) {
  return copy("cuMemcpyDtoHAsync", host, device, size, stream, true);
}

int cuMemcpyHtoDAsync_v2(uintptr_t device, const void* host, size_t size, void* stream) {
  return copy("cuMemcpyHtoDAsync", (void*)(uintptr_t)host, device, size, stream, false);
}
