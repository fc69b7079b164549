// The sockets of a provider on kernel sockets: those of this process, found by their addresses.
#pragma once

#include <sys/socket.h>

#include <vector>

namespace pdnode {

// A congestion control that paces (BBR) costs a connection over loopback a quarter of its rate and
// sets a timer for every segment, though nothing is ever congested there. libfabric does not let us
// choose, so this gives `reno`, which every kernel has, to those sockets of this process that end
// at `own` or lead to `peer` (null: unknown) and whose two ends have one host. All other sockets,
// and other congestion controls, stay as the operator has set them.
void stop_pacing_on_loopback(const sockaddr_storage& own, const sockaddr_storage* peer);

// Shuts down what was accepted at `listener` and does not lead to one of `known`; how many there
// are. Their owner hears of it as of a peer that has gone, and closes them.
size_t cut_strangers(const sockaddr_storage& listener, const std::vector<sockaddr_storage>& known);

}  // namespace pdnode
