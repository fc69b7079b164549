// Digests of KV pages: what a peer's pages are compared with (`verify` of the configuration).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory.hpp"

namespace pdnode {

// The same `length` bytes, from `offset` on, of pages in each of `layers` layers.
struct DigestArguments {
  int64_t layers = 0, layer_stride = 0, page_stride = 0, offset = 0, length = 0;
};

// xxh3-64 of each page and layer, eight bytes each (little-endian), layers of a page together.
// Empty, with `error` set, if a page is outside the region. Reads memory that others may write to.
std::string digest_pages(const Region& region, const DigestArguments& arguments,
                         const std::vector<int64_t>& pages, Error* error);

}  // namespace pdnode
