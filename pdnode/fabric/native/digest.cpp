#include "digest.hpp"


#define XXH_INLINE_ALL
#include <xxhash.h>


namespace pdnode {
namespace {

// Empty if every byte named is inside the region. Strides and counts are at most its size, so
// that no product overflows.
std::string outside(const Region& region, const DigestArguments& a,
                    const std::vector<int64_t>& pages) {
  if (region.dmabuf.get() >= 0) return "the memory of a device cannot be read here";
  const auto size = static_cast<int64_t>(region.size());
  for (const int64_t value : {a.layers, a.layer_stride, a.page_stride, a.offset, a.length}) {
    if (value < 0 || value > size) return "layers, strides, offset and length must fit the region";
  }
  if (a.layers < 1 || a.length < 1 || a.page_stride < 1) return "nothing to digest";
  if (a.offset + a.length > a.page_stride) return "the piece is longer than a page";
  if (a.layer_stride > 0 && a.layers - 1 > size / a.layer_stride) return "layers: outside";
  const int64_t last_layer = (a.layers - 1) * a.layer_stride;
  for (const int64_t page : pages) {
    if (page < 0 || page > size / a.page_stride ||
        last_layer + page * a.page_stride + a.offset + a.length > size) {
      return "page " + std::to_string(page) + " is outside the region";
    }
  }
  return "";
}

}  // namespace

std::string digest_pages(const Region& region, const DigestArguments& arguments,
                         const std::vector<int64_t>& pages, Error* error) {
  if (const std::string text = outside(region, arguments, pages); !text.empty()) {
    *error = Error("digest: " + text);
    return "";
  }
  std::string digests(pages.size() * static_cast<size_t>(arguments.layers) * 8, '\0');
  char* out = &digests[0];
  for (const int64_t page : pages) {
    for (int64_t layer = 0; layer < arguments.layers; ++layer, out += 8) {
      const uint8_t* data = region.data() + layer * arguments.layer_stride +
                            page * arguments.page_stride + arguments.offset;
      const uint64_t digest = XXH3_64bits(data, static_cast<size_t>(arguments.length));
      for (int byte = 0; byte < 8; ++byte) out[byte] = static_cast<char>(digest >> (8 * byte));
    }
  }
  return digests;
}

}  // namespace pdnode
