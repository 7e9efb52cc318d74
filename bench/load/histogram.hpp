// Latencies in logarithmic buckets: constant memory however long a run is, each value kept
// within 1 %.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

class Histogram {
  public:
    void add(std::uint64_t value_ns) {
        ++buckets_[bucket_of(value_ns)];
        ++count_;
        max_ns_ = std::max(max_ns_, value_ns);
    }

    void merge(const Histogram& other) {
        for (std::size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
        count_ += other.count_;
        max_ns_ = std::max(max_ns_, other.max_ns_);
    }

    std::uint64_t count() const { return count_; }
    double max_us() const { return static_cast<double>(max_ns_) / 1e3; }

    // The value below which `share` of the values lie, as the middle of its bucket.
    double quantile_us(double share) const {
        if (count_ == 0) return 0;
        const double wanted = share * static_cast<double>(count_);
        std::uint64_t seen = 0;
        for (std::size_t i = 0; i < buckets_.size(); ++i) {
            seen += buckets_[i];
            if (buckets_[i] != 0 && static_cast<double>(seen) >= wanted)
                return std::min(middle_ns(i), static_cast<double>(max_ns_)) / 1e3;
        }
        return max_us();
    }

  private:
    static constexpr unsigned kStepBits = 6;  // 64 steps for each power of two: at most 1.6 % wide
    static constexpr std::uint64_t kSteps = 1u << kStepBits;

    static std::size_t bucket_of(std::uint64_t value) {
        if (value < kSteps) return value;
        const unsigned power = 63u - static_cast<unsigned>(__builtin_clzll(value));
        const unsigned shift = power - kStepBits;
        return (static_cast<std::size_t>(shift) + 1) * kSteps + ((value >> shift) - kSteps);
    }

    static double middle_ns(std::size_t bucket) {
        if (bucket < kSteps) return static_cast<double>(bucket);
        const std::size_t shift = bucket / kSteps - 1;
        const double low = static_cast<double>((bucket % kSteps + kSteps) << shift);
        return low + static_cast<double>(std::uint64_t{1} << shift) / 2;
    }

    std::array<std::uint64_t, 60 * kSteps> buckets_{};
    std::uint64_t count_ = 0;
    std::uint64_t max_ns_ = 0;
};
