// TCP between two nodes of one host.
#pragma once

#include <sys/socket.h>

namespace pdnode {

// A congestion control that paces (BBR) costs a connection over loopback a quarter of its rate and
// sets a timer for every segment, though nothing is ever congested there. libfabric does not let us
// choose, so this gives `reno`, which every kernel has, to those sockets of this process that end
// at `own` or lead to `peer` (null: unknown) and whose two ends have one host. All other sockets,
// and other congestion controls, stay as the operator has set them.
void stop_pacing_on_loopback(const sockaddr_storage& own, const sockaddr_storage* peer);

}  // namespace pdnode
