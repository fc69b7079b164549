// Two nodes of the transfer core in one process, what they said, and the fake's controls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "fabric.hpp"

namespace pdnode::test {

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void check(bool condition, const std::string& what);

// The fake libfabric's own door; none of it there when the library is a real one.
class Fake {
 public:
  explicit Fake(const std::string& library);
  bool there() const { return control_ != nullptr; }
  void set(const char* rule, int64_t value) const;
  void personality(const std::string& name) const;
  int64_t count(const char* kind) const;
  std::string violations() const;
  // Waits until nothing is on the wire any more.
  void settle() const;

 private:
  int (*control_)(const char*, int64_t) = nullptr;
  void (*personality_)(const char*) = nullptr;
  int64_t (*count_)(const char*) = nullptr;
  const char* (*violations_)() = nullptr;
};

struct Shape {
  uint64_t pages = 16, page_bytes = 64, layers = 1;
  uint64_t layer_stride() const { return pages * page_bytes; }
  uint64_t bytes() const { return layer_stride() * layers; }
};

class Node {
 public:
  Node(const std::string& library, const std::string& provider, const Shape& shape,
       double silence_s = 60, bool device_memory = false);
  ~Node();
  Node(const Node&) = delete;

  // Gathers events; the first one that fits is taken out. `number`: transfer or session, or slot
  // for reached and overshoot.
  bool take(EventKind kind, int64_t number, Event* event = nullptr);
  Event wait(EventKind kind, int64_t number);
  bool has(EventKind kind, int64_t number);
  const std::vector<Event>& gather();

  std::string address(int64_t session) const;
  void listen() { port_ = fabric->listen(0, "127.0.0.1", 0); }
  RemoteTable described(int64_t session) const;
  uint64_t statistic(const std::string& name) const;
  uint8_t* page(uint64_t number, uint64_t layer) const {
    return memory + layer * shape.layer_stride() + number * shape.page_bytes;
  }
  std::vector<uint8_t> bytes() const { return {memory, memory + shape.bytes()}; }

  const Shape shape;
  const bool rdm;
  std::unique_ptr<Fabric> fabric;
  uint8_t* memory = nullptr;
  int region = -1;

 private:
  Fd fd_;
  int port_ = 0;
  std::vector<Event> events_;
};

// Waits for `condition`, at most 30 s.
void until(const std::function<bool()>& condition, const std::string& what);

// Takes a session from nothing to `probed` on both sides. `cut`: the target describes its region
// in pieces of so many pages (0: as it is registered).
void join(Node& sender, Node& target, int64_t session, uint64_t cut);
void fence_both(Node& first, Node& second, int64_t session);

SubmitArguments program_of(const Node& sender, const Node& target, int64_t transfer);

}  // namespace pdnode::test
