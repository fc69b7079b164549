// A CUDA driver without a GPU: "device" memory is a memfd. It behaves as the driver's manual allows
// and no better: memory without access cannot be touched, copies happen when their stream is waited
// for, and whatever a driver would refuse is refused and remembered as a violation.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Results, by the driver's numbers.
enum {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kHostMemoryRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kNotSupported = 801,
};

enum { kDeviceLocation = 1, kHostLocation = 2, kReadWrite = 3, kPinned = 1, kPosixFd = 1 };
enum { kMaxDevices = 8, kMaxObjects = 256, kMaxCopies = 65536 };

// As the driver lays them out.
typedef struct {
  int type, id;
} Location;
typedef struct {
  int type, handle_types;
  Location location;
  void* win32;
  unsigned char compression, rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
} AllocationProperties;
typedef struct {
  Location location;
  int flags;
} Access;

// One piece of physical memory; `users` counts handles and mappings.
typedef struct {
  int fd, device, handles, mappings;
  size_t size;
  bool shareable, imported;
} Allocation;
typedef struct {
  uintptr_t address;
  size_t size;
  int allocation;  // mapped here, or -1
  uint8_t* backing;
  bool device_access;
} Range;
typedef struct {
  uintptr_t address;
  size_t size;
} HostRange;
typedef struct {
  void *to, *stream;
  const void* from;
  size_t size;
} Copy;

// Prints into the list of violations and returns `result`.
int complain(int result, const char* format, ...) __attribute__((format(printf, 2, 3)));
int64_t setting(const char* name, int64_t otherwise);
int devices(void);
bool initialized(void);

// memory.c: each takes the lock of stub.c.
void lock(void);
void unlock(void);
void count_memory(int64_t* allocations, int64_t* ranges);
uint8_t* device_bytes(uintptr_t address, size_t size);  // or null, with a violation
