// Links of one connection: which of them a frame is about.
//
// Handles name a link, but deliveries are numbered by the session: a disposition names no link,
// and a range in it may be about several.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "connection.hpp"

class LinkHandler {
  public:
    virtual ~LinkHandler() = default;
    virtual void on_attached() {}
    virtual void on_credit() {}
    virtual void on_transfer(const wire::Performative&, std::uint64_t /*now_ns*/) {}
    // The disposition of the broker is, among others, about a delivery that was started with
    // `due_ns`; of a receiver about one that it has settled, and due_ns is 0.
    virtual void on_settled(const wire::Performative&, std::uint64_t /*due_ns*/,
                            std::uint64_t /*now_ns*/) {}
    virtual void on_closed(const std::string& /*reason*/) {}
};

class LinkSet;

class Link {
  public:
    Link(LinkSet& set, LinkSpec spec, std::uint32_t handle, LinkHandler& handler)
        : set_(set), spec_(std::move(spec)), handle_(handle), handler_(handler) {}
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    Connection& connection() const;
    std::uint32_t handle() const { return handle_; }
    bool is_attached() const { return is_attached_; }

    // Sender: how many deliveries the broker takes.
    std::uint32_t credit() const { return serial_room(limit_, delivery_count_); }
    // Sender: the id of the next delivery, which on_settled will report.
    std::uint32_t start_delivery(std::uint64_t due_ns);
    // Receiver: allows `credit` deliveries beyond the `received` ones that came.
    void grant(std::uint64_t received, std::uint64_t credit);

  private:
    friend class LinkSet;

    LinkSet& set_;
    const LinkSpec spec_;
    const std::uint32_t handle_;
    LinkHandler& handler_;
    bool is_attached_ = false;
    std::uint32_t delivery_count_ = 0;  // sender: what was started; receiver: as attached
    std::uint32_t limit_ = 0;           // delivery count up to which the broker gives credit
};

// Deliveries of one direction by id, from the oldest that is not settled.
class Unsettled {
  public:
    struct Delivery {
        Link* link = nullptr;  // null: settled, or not to be
        std::uint64_t due_ns = 0;
    };

    std::uint32_t next_id() const { return first_ + static_cast<std::uint32_t>(entries_.size()); }
    void clear(std::uint32_t next_id);
    void add(Delivery delivery) { entries_.push_back(delivery); }
    // The delivery, which is settled now.
    Delivery take(std::uint32_t id);

  private:
    std::uint32_t first_ = 0;
    std::deque<Delivery> entries_;
};

// A connection whose links were added before it was connected.
class LinkSet : public SessionHandler {
  public:
    LinkSet(const Options& options, const std::string& container)
        : options_(options), connection_(options, container, *this) {}

    Link& add(LinkSpec spec, LinkHandler& handler);
    Connection& connection() { return connection_; }

    void on_opened() override;
    void on_attach(const wire::Performative& attach) override;
    void on_flow(const wire::Performative& flow) override;
    void on_transfer(const wire::Performative& transfer, std::uint64_t now_ns) override;
    void on_disposition(const wire::Performative& disposition, std::uint64_t now_ns) override;
    void on_detach(const wire::Performative& detach) override;
    void on_closed(const std::string& reason) override;

  private:
    friend class Link;

    Link& by_remote(std::uint32_t handle) const;
    void note_incoming(Link& link, const wire::Performative& transfer);

    const Options& options_;
    Connection connection_;
    std::vector<std::unique_ptr<Link>> links_;  // by our handle
    std::vector<Link*> by_remote_;              // by the broker's
    Unsettled outgoing_;
    Unsettled incoming_;  // only where the broker confirms
    bool has_incoming_ = false;
};

inline Connection& Link::connection() const { return set_.connection(); }
