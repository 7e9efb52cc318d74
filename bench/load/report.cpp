#include "report.hpp"

#include <sys/resource.h>

#include <cstdio>

void Report::key(const std::string& name) {
    line_ += (line_.empty() ? "\"" : ", \"") + name + "\": ";
}

void Report::add(const char* name, const std::string& text) {
    key(name);
    line_ += '"';
    for (const char c : text) {
        if (c == '"' || c == '\\') line_ += '\\';
        line_ += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    line_ += '"';
}

void Report::add(const char* name, double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", value);
    key(name);
    line_ += text;
}

void Report::add(const char* name, std::uint64_t value) {
    key(name);
    line_ += std::to_string(value);
}

void Report::add(const char* name, bool value) {
    key(name);
    line_ += value ? "true" : "false";
}

void Report::add_latency(const std::string& name, const Histogram& histogram) {
    if (histogram.count() == 0) return;
    add((name + "_p50_us").c_str(), histogram.quantile_us(0.5));
    add((name + "_p90_us").c_str(), histogram.quantile_us(0.9));
    add((name + "_p95_us").c_str(), histogram.quantile_us(0.95));
    add((name + "_p99_us").c_str(), histogram.quantile_us(0.99));
    add((name + "_p999_us").c_str(), histogram.quantile_us(0.999));
    add((name + "_max_us").c_str(), histogram.max_us());
}

void Report::print() const {
    std::printf("{%s}\n", line_.c_str());
    std::fflush(stdout);
}

double own_cpu_s() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& time) {
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
    };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}
