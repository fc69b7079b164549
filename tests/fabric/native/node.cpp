#include "node.hpp"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace pdnode::test {

void check(bool condition, const std::string& what) {
  if (!condition) throw Failure(what);
}

void until(const std::function<bool()>& condition, const std::string& what) {
  // Where a fault is planted, most runs end by this deadline.
  static const char* const patience = std::getenv("PDNODE_TEST_PATIENCE_MS");
  const int64_t wait_ms = patience != nullptr ? std::atoll(patience) : 30'000;
  const int64_t deadline = now_ns() + wait_ms * 1'000'000;
  while (!condition()) {
    check(now_ns() < deadline, what + " within " + std::to_string(wait_ms) + " ms");
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Fake::Fake(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return;
  control_ = reinterpret_cast<decltype(control_)>(dlsym(handle, "fake_control"));
  personality_ = reinterpret_cast<decltype(personality_)>(dlsym(handle, "fake_personality"));
  count_ = reinterpret_cast<decltype(count_)>(dlsym(handle, "fake_count"));
  violations_ = reinterpret_cast<decltype(violations_)>(dlsym(handle, "fake_violations"));
}

void Fake::set(const char* rule, int64_t value) const {
  if (there()) check(control_(rule, value) == 0, std::string("no rule ") + rule);
}

void Fake::personality(const std::string& name) const {
  if (there()) personality_(name.c_str());
}

int64_t Fake::count(const char* kind) const { return there() ? count_(kind) : 0; }

std::string Fake::violations() const { return there() ? violations_() : ""; }

void Fake::settle() const {
  until([this] { return count("wire") == 0; }, "the wire is not empty");
}

Node::Node(const std::string& library, const std::string& provider, const Shape& shape_,
           double silence_s, bool device_memory)
    : shape(shape_),
      rdm(find_provider(provider)->endpoint == FI_EP_RDM),
      fabric(std::make_unique<Fabric>(library, provider, "adaptive", 0, silence_s, device_memory)) {
  fabric->add_group({{"lo", "127.0.0.1"}}, -1);
  if (!rdm) listen();
  fd_.reset(memfd_create("kv", MFD_CLOEXEC));
  check(ftruncate(fd_.get(), static_cast<off_t>(shape.bytes())) == 0, "ftruncate");
  memory = static_cast<uint8_t*>(
      mmap(nullptr, shape.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
  // The memory of the "device" is a memfd as well; the fake takes its descriptor for a dma-buf.
  const auto address = reinterpret_cast<uint64_t>(memory);
  region = fabric->keep_region(
      device_memory
          ? fabric->begin_device_region(0, fd_.get(), address, shape.bytes(), shape.page_bytes, 0)
          : fabric->begin_region(0, fd_.get(), shape.bytes(), shape.page_bytes));
}

Node::~Node() {
  static_cast<void>(fabric->close());
  munmap(memory, shape.bytes());
}

const std::vector<Event>& Node::gather() {
  for (Event& event : fabric->take_events(1000)) events_.push_back(std::move(event));
  return events_;
}

bool Node::take(EventKind kind, int64_t number, Event* event) {
  gather();
  const bool of_slot = kind == EventKind::kReached || kind == EventKind::kOvershoot;
  const auto found = std::find_if(events_.begin(), events_.end(), [&](const Event& one) {
    const int64_t of = of_slot ? one.slot : one.transfer >= 0 ? one.transfer : one.session;
    return one.kind == kind && of == number;
  });
  if (found == events_.end()) return false;
  if (event != nullptr) *event = *found;
  events_.erase(found);
  return true;
}

bool Node::has(EventKind kind, int64_t number) {
  Event event;
  if (!take(kind, number, &event)) return false;
  events_.push_back(std::move(event));
  return true;
}

Event Node::wait(EventKind kind, int64_t number) {
  Event event;
  until(
      [&] {
        if (take(kind, number, &event)) return true;
        // What must not come while something else is waited for says more than a deadline.
        const auto odd = std::find_if(events_.begin(), events_.end(), [](const Event& one) {
          return one.kind == EventKind::kFailed || one.kind == EventKind::kOvershoot ||
                 one.kind == EventKind::kLost;
        });
        const bool expected = kind == EventKind::kFailed || kind == EventKind::kSettled ||
                              kind == EventKind::kLost || kind == EventKind::kOvershoot ||
                              kind == EventKind::kFenced;
        check(expected || odd == events_.end(),
              odd == events_.end()
                  ? std::string()
                  : std::string(kEventNames[static_cast<int>(odd->kind)]) + " instead of " +
                        kEventNames[static_cast<int>(kind)] + ": " + odd->text);
        return false;
      },
      std::string("no ") + kEventNames[static_cast<int>(kind)] + " of " + std::to_string(number));
  return event;
}

std::string Node::address(int64_t session) const {
  return rdm ? fabric->endpoint_name(session, 0) : "127.0.0.1:" + std::to_string(port_);
}

RemoteTable Node::described(int64_t session) const {
  RemoteTable table;
  for (const Descriptor& one : fabric->descriptors(session)) {
    table[one.region < 0 ? kScratch : 0].pieces[one.nic].push_back(
        {one.offset, one.length, one.base, one.key});
  }
  return table;
}

uint64_t Node::statistic(const std::string& name) const {
  for (const auto& [key, value] : fabric->statistics()) {
    if (name == key) return value;
  }
  throw Failure("no statistic " + name);
}

namespace {

void cut_pieces(std::vector<RemotePiece>* pieces, uint64_t step) {
  std::vector<RemotePiece> cut;
  for (const RemotePiece& one : *pieces) {
    for (uint64_t at = 0; at < one.length; at += step) {
      cut.push_back({one.offset + at, std::min(step, one.length - at), one.base + at, one.key});
    }
  }
  *pieces = std::move(cut);
}

}  // namespace

void join(Node& sender, Node& target, int64_t session, uint64_t cut) {
  const std::string token(16, static_cast<char>('a' + session % 26));
  sender.fabric->open_session(session, {0}, {}, token);
  target.fabric->open_session(session, {0}, {target.region}, token);
  sender.wait(EventKind::kOpened, session);
  target.wait(EventKind::kOpened, session);
  target.fabric->connect(session, {0, 0}, sender.address(session), 10);
  if (sender.rdm) sender.fabric->connect(session, {0, 0}, target.address(session), 10);
  sender.wait(EventKind::kConnected, session);
  target.wait(EventKind::kConnected, session);
  RemoteTable table = target.described(session);
  if (cut > 0) cut_pieces(&table[0].pieces[0], cut * target.shape.page_bytes);
  sender.fabric->set_remote(session, std::move(table));
  target.fabric->set_remote(session, sender.described(session));
  sender.fabric->probe(session);
  target.fabric->probe(session);
  sender.wait(EventKind::kProbed, session);
  target.wait(EventKind::kProbed, session);
}

void fence_both(Node& first, Node& second, int64_t session) {
  for (Node* node : {&first, &second}) {
    node->fabric->fence(session, std::nullopt);
    node->wait(EventKind::kFenced, session);
    while (node->take(EventKind::kLost, session)) {
    }
  }
}

SubmitArguments program_of(const Node& sender, const Node& target, int64_t transfer) {
  SubmitArguments a;
  a.transfer = transfer;
  a.layers = static_cast<int64_t>(sender.shape.layers);
  a.region = sender.region;
  a.source_layer_stride = static_cast<int64_t>(sender.shape.layer_stride());
  a.remote_layer_stride = static_cast<int64_t>(target.shape.layer_stride());
  a.source_page_stride = a.remote_page_stride = static_cast<int64_t>(sender.shape.page_bytes);
  a.length = a.source_page_stride;
  a.whole_page = true;
  return a;
}

}  // namespace pdnode::test
