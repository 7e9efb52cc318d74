// Sends a quota of messages over one link and counts what became of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "histogram.hpp"
#include "link.hpp"
#include "message.hpp"

class Sender : public LinkHandler {
  public:
    struct Tally {
        std::uint64_t sent = 0;
        std::uint64_t accepted = 0;
        std::uint64_t rejected = 0;
        std::uint64_t released = 0;  // or modified: the broker would have it sent again
    };

    Sender(const Options& options, LinkSet& links, LinkSpec spec, std::uint64_t quota, double rate,
           std::uint64_t run_id, std::uint64_t first_number);

    // Queues what window, credit and schedule allow, until the connection is full.
    void pump(std::uint64_t now_ns);
    void start(std::uint64_t now_ns) { start_ns_ = now_ns; }
    bool is_done() const { return settled() >= quota_; }
    bool has_credit() const { return link_.credit() != 0; }
    std::uint64_t settled() const { return tally_.accepted + tally_.rejected + tally_.released; }
    // When the schedule of an open loop wants the next message; 0: no schedule, or all is sent.
    std::uint64_t next_due_ns() const;

    void on_attached() override;
    void on_settled(const wire::Performative& disposition, std::uint64_t due_ns,
                    std::uint64_t now_ns) override;

    const Tally& tally() const { return tally_; }
    const Histogram& latency() const { return latency_; }
    std::uint64_t end_ns() const { return end_ns_; }
    const std::string& refusal() const { return refusal_; }

  private:
    bool may_start(std::uint64_t now_ns) const;
    std::uint64_t due_ns(std::uint64_t index, std::uint64_t now_ns) const;

    const Options& options_;
    Link& link_;
    Connection& connection_;
    std::unique_ptr<EncodedMessage> message_;
    std::uint64_t quota_;
    double rate_;
    std::uint64_t run_id_;
    std::uint64_t first_number_;  // of the messages of all senders, those of this one follow

    std::size_t frame_ = 0;  // next frame of the message that is being sent
    std::uint64_t start_ns_ = 0;
    std::uint64_t end_ns_ = 0;
    Tally tally_;
    Histogram latency_;
    std::string refusal_;  // the first reason a message was rejected with
};
