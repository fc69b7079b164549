// libfabric, loaded by dlopen. All other calls are inline and go through the objects' tables.
#pragma once

#include <rdma/fabric.h>

#include <string>

#include "error.hpp"

namespace pdnode {

class Library {
 public:
  // Loads `path` (absolute), once per process; a second, different library is refused.
  static Error load(const std::string& path, const Library** library);

  // `operation: text (code) [provider]`; empty for code ≥ 0.
  Error check(const char* operation, int64_t code, const char* provider) const;

  const std::string& version() const { return version_; }
  const std::string& path() const { return path_; }

  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_version) api_version = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;

 private:
  Error open(const std::string& path);

  std::string path_;
  std::string version_;
};

// The API that we ask for, without memory of devices (compat.hpp): EFA's own writes need it.
constexpr uint32_t kApiVersion = FI_VERSION(1, 18);

// Owner of a chain of fi_info. Made only by the library itself (fi_dupinfo, fi_getinfo): newer
// libraries read newer, longer structs than our headers have.
class Info {
 public:
  Info() = default;
  Info(const Library* library, fi_info* info) : library_(library), info_(info) {}
  Info(Info&& other) noexcept;
  Info& operator=(Info&& other) noexcept;
  ~Info();
  fi_info* get() const { return info_; }
  fi_info* operator->() const { return info_; }
  explicit operator bool() const { return info_ != nullptr; }

 private:
  const Library* library_ = nullptr;
  fi_info* info_ = nullptr;
};

}  // namespace pdnode
