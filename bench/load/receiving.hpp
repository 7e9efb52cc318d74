// The common part of receivers: messages counted, timed, completed.
#pragma once

#include <cstdint>

#include "connection.hpp"
#include "histogram.hpp"
#include "message.hpp"

class Receiving {
  public:
    struct Tally {
        std::uint64_t received = 0;
        std::uint64_t completed = 0;   // confirmed by the broker, where it confirms
        std::uint64_t strays = 0;      // messages of another run
        std::uint64_t body_bytes = 0;  // payload, with the sections around the body
        std::uint64_t sessions = 0;    // sessions accepted
    };

    Receiving(const Options& options, std::uint64_t quota, std::uint64_t run_id)
        : options_(options), quota_(quota), run_id_(run_id) {}
    virtual ~Receiving() = default;

    virtual Connection& connection() = 0;
    virtual bool is_attached() const = 0;
    // Queues settlements that wait for a full range, and the credit that is due.
    virtual void pump() = 0;
    bool is_done() const { return tally_.completed >= quota_; }

    const Tally& tally() const { return tally_; }
    const Histogram& latency() const { return latency_; }
    std::uint64_t end_ns() const { return end_ns_; }

  protected:
    // Reads the stamp in the first frame of a delivery.
    void note_first_frame(const wire::Performative& transfer, std::uint64_t now_ns);
    // Completes, or rejects, the deliveries from `first` to `last`.
    void queue_disposition(std::uint32_t first, std::uint32_t last);
    void count_completed(std::uint64_t number, std::uint64_t now_ns);

    const Options& options_;
    std::uint64_t quota_;
    Tally tally_;

  private:
    std::uint64_t run_id_;
    std::uint64_t end_ns_ = 0;
    Histogram latency_;
};
