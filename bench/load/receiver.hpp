// Receives a quota of messages over one link in peek-lock and completes each of them.
#pragma once

#include <cstdint>

#include "link.hpp"
#include "receiving.hpp"

class Receiver : public Receiving, public LinkHandler {
  public:
    Receiver(const Options& options, LinkSet& links, LinkSpec spec, std::uint64_t quota,
             std::uint64_t run_id)
        : Receiving(options, quota, run_id), link_(links.add(std::move(spec), *this)) {}

    Connection& connection() override { return link_.connection(); }
    bool is_attached() const override { return link_.is_attached(); }
    void pump() override;
    void on_transfer(const wire::Performative& transfer, std::uint64_t now_ns) override;
    void on_settled(const wire::Performative& disposition, std::uint64_t due_ns,
                    std::uint64_t now_ns) override;

  private:
    void complete_later(std::uint32_t delivery_id);
    void send_disposition();

    Link& link_;
    bool is_in_delivery_ = false;  // between the frames of one delivery
    bool is_presettled_ = false;
    std::uint32_t delivery_id_ = 0;
    std::uint32_t range_first_ = 0;
    std::uint32_t range_size_ = 0;
    std::uint64_t granted_ = 0;  // deliveries allowed since the attach
    std::uint64_t last_now_ns_ = 0;
};
