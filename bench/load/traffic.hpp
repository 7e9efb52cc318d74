// Modes send, receive and both: a quota of messages through one or more links each way.
#pragma once

#include "options.hpp"

// Returns the exit code.
int run_traffic(const Options& options);
