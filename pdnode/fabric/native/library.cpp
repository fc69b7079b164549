#include "library.hpp"

#include <dlfcn.h>
#include <stdlib.h>

#include <memory>
#include <mutex>
#include <utility>

namespace pdnode {

namespace {

template <class F>
bool resolve(void* handle, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(handle, name));
  return *function != nullptr;
}

std::mutex loaded_mutex;
std::unique_ptr<Library> loaded;

}  // namespace

Error Library::load(const std::string& path, const Library** library) {
  if (path.empty() || path.front() != '/') {
    return Error("library: '" + path + "' is not an absolute path");
  }
  const std::lock_guard<std::mutex> lock(loaded_mutex);
  if (!loaded) {
    auto opened = std::make_unique<Library>();
    if (Error error = opened->open(path)) return error;
    loaded = std::move(opened);
  }
  if (loaded->path_ != path) {
    return Error("libfabric: " + loaded->path_ + " is loaded in this process already, so " + path +
                 " cannot be");
  }
  *library = loaded.get();
  return Error();
}

Error Library::open(const std::string& path) {
  // A dependency of Debian's library replaces the handlers of SIGTERM and SIGINT without these.
  setenv("IPATH_NO_BACKTRACE", "1", 0);
  setenv("HFI_NO_BACKTRACE", "1", 0);
  // Never closed: providers leave threads and exit handlers behind.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return Error("library: cannot load " + path + ": " + (reason != nullptr ? reason : "unknown"));
  }
  if (!resolve(handle, "fi_version", &api_version) ||
      !resolve(handle, "fi_getinfo", &getinfo) || !resolve(handle, "fi_freeinfo", &freeinfo) ||
      !resolve(handle, "fi_dupinfo", &dupinfo) || !resolve(handle, "fi_fabric", &fabric) ||
      !resolve(handle, "fi_strerror", &strerror)) {
    return Error("library: " + path + " is not libfabric (an entry point is missing)");
  }
  const uint32_t found = api_version();
  version_ = std::to_string(FI_MAJOR(found)) + "." + std::to_string(FI_MINOR(found));
  if (FI_VERSION_LT(found, kApiVersion)) {
    return Error("library: " + path + " is libfabric " + version_ +
                 "; 1.18 or newer is needed (older ones emulate writes on EFA)");
  }
  path_ = path;
  return Error();
}

Error Library::check(const char* operation, int64_t code, const char* provider) const {
  if (code >= 0) return Error();
  const int number = static_cast<int>(-code);
  return Error(std::string(operation) + ": " + strerror(number) + " (" + std::to_string(number) +
               ") [" + provider + "]");
}

Info::Info(Info&& other) noexcept
    : library_(other.library_), info_(std::exchange(other.info_, nullptr)) {}

Info& Info::operator=(Info&& other) noexcept {
  if (this != &other) {
    if (info_ != nullptr) library_->freeinfo(info_);
    library_ = other.library_;
    info_ = std::exchange(other.info_, nullptr);
  }
  return *this;
}

Info::~Info() {
  if (info_ != nullptr) library_->freeinfo(info_);
}

}  // namespace pdnode
