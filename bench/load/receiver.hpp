// Receives a quota of messages over one link in peek-lock and completes each of them.
#pragma once

#include <cstdint>
#include <string>

#include "connection.hpp"
#include "histogram.hpp"
#include "message.hpp"

class Receiver : public LinkHandler {
  public:
    struct Tally {
        std::uint64_t received = 0;
        std::uint64_t completed = 0;   // confirmed by the broker, where it confirms
        std::uint64_t strays = 0;      // messages of another run
        std::uint64_t body_bytes = 0;  // payload, with the sections around the body
    };

    Receiver(const Options& options, LinkSpec link, std::uint64_t quota, std::uint64_t run_id);

    // Queues settlements that wait for a full range, and the credit that is due.
    void pump();
    bool is_done() const { return tally_.completed >= quota_; }

    void on_transfer(const wire::Performative& transfer, std::uint64_t now_ns) override;
    void on_disposition(const wire::Performative& disposition, std::uint64_t now_ns) override;
    void on_closed(const std::string& reason) override { failure_ = reason; }

    Connection& connection() { return connection_; }
    const Tally& tally() const { return tally_; }
    const Histogram& latency() const { return latency_; }
    std::uint64_t first_ns() const { return first_ns_; }
    std::uint64_t end_ns() const { return end_ns_; }
    const std::string& failure() const { return failure_; }

  private:
    void note_first_frame(const wire::Performative& transfer, std::uint64_t now_ns);
    void complete_later(std::uint32_t delivery_id);
    void send_disposition();
    void count_completed(std::uint64_t number, std::uint64_t now_ns);

    const Options& options_;
    Connection connection_;
    std::uint64_t quota_;
    std::uint64_t run_id_;

    bool is_in_delivery_ = false;  // between the frames of one delivery
    bool is_presettled_ = false;
    std::uint32_t delivery_id_ = 0;
    std::uint32_t range_first_ = 0;
    std::uint32_t range_size_ = 0;
    std::uint64_t granted_ = 0;  // deliveries allowed since the attach
    std::uint64_t last_now_ns_ = 0;
    std::uint64_t first_ns_ = 0;
    std::uint64_t end_ns_ = 0;
    Tally tally_;
    Histogram latency_;
    std::string failure_;
};
