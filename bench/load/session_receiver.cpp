#include "session_receiver.hpp"

namespace {

constexpr std::uint32_t kNoLink = 0xffffffffu;

}  // namespace

SessionReceiver::SessionReceiver(const Options& options, LinkSpec spec, std::uint64_t quota,
                                 std::uint64_t run_id)
    : Receiving(options, quota, run_id),
      spec_(std::move(spec)),
      connection_(options, spec_.name, *this),
      links_(options.session_links) {
    link_by_delivery_.reserve(quota);
}

void SessionReceiver::pump() {
    if (has_started_ || !connection_.is_ready()) return;
    has_started_ = true;
    for (std::size_t index = 0; index < links_.size(); ++index) attach(index);
}

// The name identifies the link of the answer; it must be new, as the broker may know the old one.
void SessionReceiver::attach(std::size_t index) {
    links_[index] = SessionLink{};
    links_[index].state = SessionLink::State::kAttaching;
    LinkSpec link = spec_;
    link.name = std::to_string(index) + "-" + std::to_string(attach_count_++) + "-" + spec_.name;
    connection_.attach_session(static_cast<std::uint32_t>(index), link);
}

void SessionReceiver::on_attach(const wire::Performative& attach) {
    const std::size_t index = std::stoul(std::string(attach.fields[0].text()));
    if (index >= links_.size()) throw wire::ProtocolError("unrequested attach of a link");
    const std::uint32_t remote = attach.u32(1);
    if (by_remote_.size() <= remote) by_remote_.resize(remote + 1, kNoLink);
    by_remote_[remote] = static_cast<std::uint32_t>(index);
    if (attach.fields[5].is_null()) return;  // refused: a detach follows
    SessionLink& link = links_[index];
    link.state = SessionLink::State::kHeld;
    link.first = link.received = link.granted = link.completed = attach.u32(9);
    ++tally_.sessions;
    take_up(index);
}

// Grants what a session may still get, or lets it go when nothing is left to do.
void SessionReceiver::take_up(std::size_t index) {
    SessionLink& link = links_[index];
    if (link.state != SessionLink::State::kHeld || link.is_draining) return;
    const auto handle = static_cast<std::uint32_t>(index);
    const std::uint32_t more = link.completed + options_.credit - link.granted;
    const bool is_settled = link.completed == link.received;
    if (link.is_empty) {
        if (!is_settled) return;
        link.state = SessionLink::State::kDetaching;
        connection_.detach(handle);
    } else if (more * 2 >= options_.credit) {
        link.granted += more;
        connection_.grant(handle, link.received, link.granted - link.received);
    } else if (is_settled && link.received != link.first && !options_.holds_sessions) {
        link.is_draining = true;
        connection_.grant(handle, link.received, link.granted - link.received, true);
    }
}

void SessionReceiver::on_transfer(const wire::Performative& transfer, std::uint64_t now) {
    SessionLink* link = link_of(transfer.u32(0));
    if (link == nullptr || transfer.fields[5].number == 1)
        throw wire::ProtocolError("a transfer of a foreign link or of several frames");
    note_first_frame(transfer, now);
    tally_.body_bytes += transfer.payload_size;
    ++tally_.received;
    if (++link->received == link->granted) link->is_draining = false;
    const std::uint32_t id = transfer.u32(1);
    if (link_by_delivery_.empty()) first_delivery_id_ = id;
    if (id - first_delivery_id_ != link_by_delivery_.size())
        throw wire::ProtocolError("delivery ids with gaps");
    const auto index = static_cast<std::size_t>(link - links_.data());
    link_by_delivery_.push_back(static_cast<std::uint16_t>(index));
    queue_disposition(id, id);
    if (!options_.confirms_settlement) {
        ++link->completed;
        count_completed(1, now);
    }
    take_up(index);
}

void SessionReceiver::on_disposition(const wire::Performative& disposition, std::uint64_t now) {
    const bool is_about_received = disposition.fields[0].number == 0;
    const bool is_settled = disposition.fields[3].number == 1;
    if (!is_about_received || !is_settled || !options_.confirms_settlement) return;
    const std::uint32_t first = disposition.u32(1);
    const std::uint32_t last = disposition.fields[2].is_null() ? first : disposition.u32(2);
    for (std::uint32_t id = first; static_cast<std::int32_t>(last - id) >= 0; ++id) {
        const std::size_t index = link_by_delivery_.at(id - first_delivery_id_);
        ++links_[index].completed;
        take_up(index);
    }
    count_completed(std::uint64_t{last - first} + 1, now);
}

// A drain is answered by counting up the credit that was not used: then there is nothing more.
void SessionReceiver::on_flow(const wire::Performative& flow) {
    SessionLink* link = link_of(flow.u32(4));
    if (link == nullptr || !link->is_draining || flow.u32(5) != link->granted) return;
    link->is_draining = false;
    link->is_empty = link->received != link->granted;
    take_up(static_cast<std::size_t>(link - links_.data()));
}

// Our own detach is answered, or no session came in time.
void SessionReceiver::on_detach(const wire::Performative& detach) {
    SessionLink* link = link_of(detach.u32(0));
    if (link == nullptr) throw wire::ProtocolError("detach of a foreign link");
    by_remote_[detach.u32(0)] = kNoLink;
    const auto index = static_cast<std::size_t>(link - links_.data());
    if (link->state == SessionLink::State::kHeld)
        return connection_.fail("session lost: " + wire::describe_error(detach.fields[2]));
    if (link->state == SessionLink::State::kAttaching)
        connection_.detach(static_cast<std::uint32_t>(index));
    attach(index);
}

SessionReceiver::SessionLink* SessionReceiver::link_of(std::uint32_t remote_handle) {
    if (remote_handle >= by_remote_.size() || by_remote_[remote_handle] == kNoLink) return nullptr;
    return &links_[by_remote_[remote_handle]];
}
