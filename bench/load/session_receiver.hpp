// Receives a quota of messages session by session, over many links of one connection.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "receiving.hpp"

// Each link takes the next available session, completes what comes and asks for more as an SDK
// does; when all is completed it drains, lets the session go and takes the next one. With
// --hold-sessions it keeps the first it got.
class SessionReceiver : public Receiving, public SessionHandler {
  public:
    SessionReceiver(const Options& options, LinkSpec spec, std::uint64_t quota,
                    std::uint64_t run_id);

    Connection& connection() override { return connection_; }
    bool is_attached() const override { return connection_.is_ready(); }
    void pump() override;
    void on_opened() override {}
    void on_transfer(const wire::Performative& transfer, std::uint64_t now_ns) override;
    void on_disposition(const wire::Performative& disposition, std::uint64_t now_ns) override;
    void on_attach(const wire::Performative& attach) override;
    void on_flow(const wire::Performative& flow) override;
    void on_detach(const wire::Performative& detach) override;

  private:
    struct SessionLink {
        enum class State { kFree, kAttaching, kHeld, kDetaching };
        State state = State::kFree;
        std::uint32_t first = 0;  // delivery-count of the attach; the others count on from it
        std::uint32_t received = 0;
        std::uint32_t granted = 0;
        std::uint32_t completed = 0;
        bool is_draining = false;
        bool is_empty = false;  // a drain has found the end of the session
    };

    void attach(std::size_t index);
    void take_up(std::size_t index);
    SessionLink* link_of(std::uint32_t remote_handle);

    const LinkSpec spec_;  // of all links, which have a number each before their name
    Connection connection_;
    std::uint64_t attach_count_ = 0;
    bool has_started_ = false;
    std::vector<SessionLink> links_;       // by our handle
    std::vector<std::uint32_t> by_remote_; // broker's handle to ours
    std::vector<std::uint16_t> link_by_delivery_;
    std::uint32_t first_delivery_id_ = 0;
};
