// The self-test of a NIC, on endpoints and queues of its own.

#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "nic.hpp"
#include "util.hpp"

namespace pdnode {

namespace {

constexpr int64_t kDeadlineNs = 10'000'000'000;
constexpr uint32_t kImmediate = 0x800a5001;  // top bit set: sign extension would show
constexpr size_t kBytes = 64;

class SelfTest {
 public:
  explicit SelfTest(const Nic& nic) : nic_(nic), deadline_ns_(now_ns() + kDeadlineNs) {}

  Error run() {
    if (Error error = nic_.open_queues(false, &queues_)) return error;
    for (size_t i = 0; i < kBytes; ++i) source_[i] = static_cast<uint8_t>(i * 7 + 1);
    if (Error error =
            nic_.register_piece({target_.data(), kBytes}, 0, kBytes, FI_REMOTE_WRITE, &remote_)) {
      return error;
    }
    if (nic_.limits.local_registration) {
      if (Error error =
              nic_.register_piece({source_.data(), kBytes}, 0, kBytes, FI_WRITE, &local_)) {
        return error;
      }
    }
    if (Error error = nic_.provider.endpoint == FI_EP_MSG ? connect_msg() : connect_rdm()) {
      return error;
    }
    if (nic_.limits.posts_receives) {
      if (Error error = post_receive()) return error;
    }
    return write_and_check();
  }

 private:
  Error expired(const char* what) const {
    return Error(std::string("self-test: ") + what + " within 10 s on NIC " + nic_.name + " [" +
                 nic_.label() + "]");
  }

  Error post_receive() {
    ssize_t code = -FI_EAGAIN;
    while (code == -FI_EAGAIN) {
      if (now_ns() > deadline_ns_) return expired("no receive could be posted");
      code = fi_recv(receiver_.get(), nullptr, 0, nullptr, FI_ADDR_UNSPEC, &receive_context_);
      if (code == -FI_EAGAIN) poll_completions();
    }
    return nic_.library.check("fi_recv", code, nic_.label());
  }

  Error connect_rdm() {
    if (Error error = nic_.open_av(&sender_av_)) return error;
    if (Error error = nic_.open_av(&receiver_av_)) return error;
    if (Error error =
            nic_.open_endpoint(nic_.info.get(), queues_, sender_av_.get(), &sender_)) {
      return error;
    }
    if (Error error =
            nic_.open_endpoint(nic_.info.get(), queues_, receiver_av_.get(), &receiver_)) {
      return error;
    }
    if (Error error = learn(sender_.get(), receiver_av_.get(), &ignored_)) return error;
    return learn(receiver_.get(), sender_av_.get(), &peer_);
  }

  Error learn(fid_ep* of, fid_av* in, fi_addr_t* address) {
    std::array<uint8_t, 512> name{};
    size_t size = name.size();
    const int code = fi_getname(&of->fid, name.data(), &size);
    if (Error error = nic_.library.check("fi_getname", code, nic_.label())) return error;
    if (fi_av_insert(in, name.data(), 1, address, 0, nullptr) != 1) {
      return Error(std::string("fi_av_insert: refused [") + nic_.label() + "]");
    }
    return Error();
  }

  Error connect_msg() {
    Fid<fid_pep> listener;
    int code = fi_passive_ep(nic_.fabric.get(), nic_.info.get(), listener.out(), nullptr);
    if (Error error = nic_.library.check("fi_passive_ep", code, nic_.label())) return error;
    code = fi_pep_bind(listener.get(), &queues_.eq->fid, 0);
    if (Error error = nic_.library.check("fi_pep_bind", code, nic_.label())) return error;
    code = fi_listen(listener.get());
    if (Error error = nic_.library.check("fi_listen", code, nic_.label())) return error;
    std::array<uint8_t, 512> name{};
    size_t size = name.size();
    code = fi_getname(&listener->fid, name.data(), &size);
    if (Error error = nic_.library.check("fi_getname", code, nic_.label())) return error;
    const Info toward = nic_.info_for(name.data(), size);
    if (!toward) return Error("fi_dupinfo: out of memory");
    if (Error error = nic_.open_endpoint(toward.get(), queues_, nullptr, &sender_)) return error;
    code = fi_connect(sender_.get(), name.data(), nullptr, 0);
    if (Error error = nic_.library.check("fi_connect", code, nic_.label())) return error;
    for (int connected = 0; connected < 2;) {
      if (now_ns() > deadline_ns_) return expired("no connection to itself");
      if (Error error = read_events(&connected)) return error;
      poll_completions();
    }
    int strangers = 0;
    while (nic_.cut_half_open(*listener.get(), {receiver_.get()}) > 0) {
      if (now_ns() > deadline_ns_) return expired("no end of connections from elsewhere");
      if (Error error = read_events(&strangers)) return error;
    }
    return Error();
  }

  Error read_events(int* connected) {
    alignas(fi_eq_cm_entry) std::array<uint8_t, 1024> buffer;
    uint32_t kind = 0;
    const auto size = fi_eq_read(queues_.eq.get(), &kind, buffer.data(), buffer.size(), 0);
    if (size == -FI_EAGAIN) {
      std::this_thread::yield();
      return Error();
    }
    if (size == -FI_EAVAIL) {
      fi_eq_err_entry failure = {};
      fi_eq_readerr(queues_.eq.get(), &failure, 0);
      return nic_.library.check("self-test: connecting", -failure.err, nic_.label());
    }
    if (Error error = nic_.library.check("fi_eq_read", size, nic_.label())) return error;
    if (kind == FI_CONNECTED) ++*connected;
    if (kind != FI_CONNREQ) return Error();
    auto* entry = reinterpret_cast<fi_eq_cm_entry*>(buffer.data());
    const Info request(&nic_.library, entry->info);
    if (Error error = nic_.open_endpoint(request.get(), queues_, nullptr, &receiver_)) {
      return error;
    }
    return nic_.library.check("fi_accept", fi_accept(receiver_.get(), nullptr, 0), nic_.label());
  }

  void poll_completions() {
    fi_cq_data_entry entry = {};
    const auto count = fi_cq_read(queues_.cq.get(), &entry, 1);
    if (count == 1) {
      if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
        arrived_ = true;
        data_ = entry.data;
      } else if (entry.op_context == &write_context_) {
        completed_ = true;
      }
    } else if (count == -FI_EAVAIL) {
      alignas(fi_cq_err_entry) std::array<uint8_t, 512> buffer{};  // newer entries are longer
      auto* failure = reinterpret_cast<fi_cq_err_entry*>(buffer.data());
      fi_cq_readerr(queues_.cq.get(), failure, 0);
      failure_ = failure->err != 0 ? failure->err : FI_EIO;
    }
  }

  Error write_and_check() {
    void* desc = nic_.limits.local_registration ? fi_mr_desc(local_.mr.get()) : nullptr;
    iovec source = {source_.data(), kBytes};
    fi_rma_iov target = {remote_.base, kBytes, remote_.key};
    fi_msg_rma message = {};
    message.msg_iov = &source;
    message.desc = &desc;
    message.iov_count = 1;
    message.addr = peer_;
    message.rma_iov = &target;
    message.rma_iov_count = 1;
    message.context = &write_context_;
    message.data = kImmediate;
    const uint64_t flags = FI_COMPLETION | FI_REMOTE_CQ_DATA | nic_.provider.delivery_flag;
    ssize_t code = -FI_EAGAIN;
    while (code == -FI_EAGAIN) {
      if (now_ns() > deadline_ns_) return expired("no write could be posted");
      code = fi_writemsg(sender_.get(), &message, flags);
      poll_completions();
    }
    if (Error error = nic_.library.check("fi_writemsg", code, nic_.label())) return error;
    while (!(completed_ && arrived_) && failure_ == 0) {
      if (now_ns() > deadline_ns_) return expired("no completion");
      poll_completions();
    }
    if (failure_ != 0) {
      return nic_.library.check("self-test: write", -failure_, nic_.label());
    }
    if (static_cast<uint32_t>(data_) != kImmediate || source_ != target_) {
      return Error("self-test: immediate or payload arrived changed on NIC " + nic_.name + " [" +
                   nic_.label() + "]");
    }
    return Error();
  }

  // In this order: endpoints are closed first, then registrations, address vectors and queues.
  const Nic& nic_;
  const int64_t deadline_ns_;
  std::array<uint8_t, kBytes> source_{}, target_{};
  fi_context2 write_context_{}, receive_context_{};
  Queues queues_;
  Fid<fid_av> sender_av_, receiver_av_;
  Registration remote_, local_;
  Fid<fid_ep> receiver_, sender_;
  fi_addr_t peer_ = FI_ADDR_UNSPEC, ignored_ = FI_ADDR_UNSPEC;
  bool completed_ = false, arrived_ = false;
  uint64_t data_ = 0;
  int failure_ = 0;
};

}  // namespace

Error Nic::self_test() const { return SelfTest(*this).run(); }

}  // namespace pdnode
