// The one JSON line a run ends with.
#pragma once

#include <cstdint>
#include <string>

#include "histogram.hpp"

class Report {
  public:
    void add(const char* name, const std::string& text);
    void add(const char* name, double value);
    void add(const char* name, std::uint64_t value);
    void add(const char* name, bool value);
    // Adds NAME_p50_us, ..._p99_us and so on; nothing when there are no values.
    void add_latency(const std::string& name, const Histogram& histogram);
    void print() const;

  private:
    void key(const std::string& name);
    std::string line_;
};

// User and system time this process has used.
double own_cpu_s();
