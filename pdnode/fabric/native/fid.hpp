// Owner of one libfabric object.
#pragma once

#include <rdma/fabric.h>

#include <utility>

namespace pdnode {

template <class T>
class Fid {
 public:
  Fid() = default;
  Fid(Fid&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Fid& operator=(Fid&& other) noexcept {
    if (this != &other) {
      reset();
      object_ = std::exchange(other.object_, nullptr);
    }
    return *this;
  }
  ~Fid() { reset(); }

  // What fi_close says. A second attempt would be of no use: the object is given up in any case.
  int close() {
    return object_ == nullptr ? 0 : fi_close(&std::exchange(object_, nullptr)->fid);
  }
  void reset() { close(); }
  // Gives the object up without closing it (an endpoint that must not be closed yet, ever).
  T* release() { return std::exchange(object_, nullptr); }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T** out() {
    reset();
    return &object_;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

}  // namespace pdnode
