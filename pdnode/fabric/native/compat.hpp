// What libfabric 1.20 has and the headers we build with (1.17) have not: memory of a device,
// registered by its dma-buf. Only for libraries whose fi_version() is kDeviceApiVersion or more.
#pragma once

#include <rdma/fi_domain.h>

#include <cstddef>
#include <cstdint>

namespace pdnode {

constexpr uint32_t kDeviceApiVersion = FI_VERSION(1, 20);
constexpr uint64_t kDmaBufFlag = uint64_t{1} << 40;  // FI_MR_DMABUF

// struct fi_mr_dmabuf.
struct DmaBuf {
  int fd;
  uint64_t offset;  // of the piece in the dma-buf
  size_t length;
  void* base;  // where the dma-buf is mapped
};

// struct fi_mr_attr, whole: a library reads as much as its own version of it has, which is more
// than our headers know. What came later than they stands at the end and is 0.
struct RegionAttributes {
  const DmaBuf* dmabuf;
  size_t count;
  uint64_t access;
  uint64_t offset;
  uint64_t requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  fi_hmem_iface interface;
  uint64_t device;
  void* hmem_data;
  size_t page_size;
  const fid_mr* base_region;
  size_t sub_regions;
};
static_assert(offsetof(RegionAttributes, access) == offsetof(fi_mr_attr, access));
static_assert(offsetof(RegionAttributes, requested_key) == offsetof(fi_mr_attr, requested_key));
static_assert(offsetof(RegionAttributes, interface) == offsetof(fi_mr_attr, iface));
static_assert(offsetof(RegionAttributes, device) == offsetof(fi_mr_attr, device));
static_assert(offsetof(RegionAttributes, hmem_data) == sizeof(fi_mr_attr));

}  // namespace pdnode
