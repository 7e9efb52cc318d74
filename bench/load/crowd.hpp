// Modes idle and storm: many connections that hardly send anything.
#pragma once

#include "options.hpp"

// Both return the exit code.
//
// idle: opens the connections, each with a receiver and some credit on it, prints a JSON line
// and holds them until standard input ends.
int run_idle(const Options& options);

// storm: serves every connection once (connect, attach, one accepted message), drops all
// sockets at once, connects all again at once and measures how long each waits to be served.
int run_storm(const Options& options);
