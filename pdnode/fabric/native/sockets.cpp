#include "sockets.hpp"

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

namespace pdnode {

namespace {

struct Address {
  std::string ip;  // as the kernel has it; empty: neither IPv4 nor IPv6
  in_port_t port = 0;
  bool loopback = false;
};

Address address_of(const sockaddr_storage& storage) {
  Address address;
  if (storage.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(storage);
    address.ip.assign(reinterpret_cast<const char*>(&v4.sin_addr), sizeof v4.sin_addr);
    address.port = v4.sin_port;
    address.loopback = address.ip[0] == 127;
  } else if (storage.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(storage);
    address.ip.assign(reinterpret_cast<const char*>(&v6.sin6_addr), sizeof v6.sin6_addr);
    address.port = v6.sin6_port;
    address.loopback = IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) != 0;
  }
  return address;
}

bool same(const Address& one, const Address& other) {
  return !one.ip.empty() && one.ip == other.ip && one.port == other.port;
}

// `at` is where a listener of `address` accepts.
bool accepts(const Address& address, const Address& at) {
  const bool any = address.ip.find_first_not_of('\0') == std::string::npos;
  return address.port == at.port && !at.ip.empty() && (any || address.ip == at.ip);
}

bool one_host(const Address& one, const Address& other) {
  return !one.ip.empty() && (one.ip == other.ip || (one.loopback && other.loopback));
}

void set_reno(int fd) {
  std::array<char, 16> name{};
  socklen_t size = name.size() - 1;
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return;
  if (std::strncmp(name.data(), "bbr", 3) != 0) return;
  // Refused: it stays slow, but right.
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

// Calls `visit` with each connected socket and its two addresses.
template <class Visit>
void each_connected(Visit visit) {
  const std::unique_ptr<DIR, int (*)(DIR*)> all(opendir("/proc/self/fd"), closedir);
  if (!all) return;
  while (const dirent* entry = readdir(all.get())) {
    const int fd = std::atoi(entry->d_name);
    sockaddr_storage local{}, remote{};
    socklen_t local_size = sizeof local, remote_size = sizeof remote;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_size) != 0 ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &remote_size) != 0) {
      continue;  // no socket, or not connected
    }
    visit(fd, address_of(local), address_of(remote));
  }
}

}  // namespace

void stop_pacing_on_loopback(const sockaddr_storage& own, const sockaddr_storage* peer) {
  const Address mine = address_of(own);
  const Address theirs = peer == nullptr ? Address() : address_of(*peer);
  each_connected([&](int fd, const Address& here, const Address& there) {
    if (one_host(here, there) && (same(here, mine) || same(there, theirs))) set_reno(fd);
  });
}

size_t cut_strangers(const sockaddr_storage& listener, const std::vector<sockaddr_storage>& known) {
  const Address at = address_of(listener);
  size_t found = 0;
  each_connected([&](int fd, const Address& here, const Address& there) {
    if (!accepts(at, here)) return;
    const bool expected = std::any_of(
        known.begin(), known.end(),
        [&there](const sockaddr_storage& one) { return same(address_of(one), there); });
    if (expected) return;
    ++found;
    shutdown(fd, SHUT_RDWR);
  });
  return found;
}

}  // namespace pdnode
