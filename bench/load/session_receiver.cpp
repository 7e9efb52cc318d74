#include "session_receiver.hpp"

namespace {

constexpr std::uint32_t kNoLane = 0xffffffffu;

}  // namespace

SessionReceiver::SessionReceiver(const Options& options, LinkSpec spec, std::uint64_t quota,
                                 std::uint64_t run_id)
    : Receiving(options, quota, run_id),
      spec_(std::move(spec)),
      connection_(options, spec_.name, *this),
      lanes_(options.session_links) {
    lane_by_delivery_.reserve(quota);
}

void SessionReceiver::pump() {
    if (has_started_ || !connection_.is_ready()) return;
    has_started_ = true;
    for (std::size_t index = 0; index < lanes_.size(); ++index) attach(index);
}

// The name tells the answer's link; it must be new, the broker may still know the old one.
void SessionReceiver::attach(std::size_t index) {
    lanes_[index] = Lane{};
    lanes_[index].state = Lane::State::kAttaching;
    LinkSpec link = spec_;
    link.name = std::to_string(index) + "-" + std::to_string(attach_count_++) + "-" + spec_.name;
    connection_.attach_session(static_cast<std::uint32_t>(index), link);
}

void SessionReceiver::on_attach(const wire::Performative& attach) {
    const std::size_t index = std::stoul(std::string(attach.fields[0].text()));
    if (index >= lanes_.size()) throw wire::ProtocolError("attach of a link nobody asked for");
    const std::uint32_t remote = attach.u32(1);
    if (by_remote_.size() <= remote) by_remote_.resize(remote + 1, kNoLane);
    by_remote_[remote] = static_cast<std::uint32_t>(index);
    if (attach.fields[5].is_null()) return;  // refused: a detach follows
    Lane& lane = lanes_[index];
    lane.state = Lane::State::kHeld;
    lane.first = lane.received = lane.granted = lane.completed = attach.u32(9);
    ++tally_.sessions;
    take_up(index);
}

// Grants what a session may still get, or lets it go when nothing is left to do.
void SessionReceiver::take_up(std::size_t index) {
    Lane& lane = lanes_[index];
    if (lane.state != Lane::State::kHeld || lane.is_draining) return;
    const auto handle = static_cast<std::uint32_t>(index);
    const std::uint32_t more = lane.completed + options_.credit - lane.granted;
    const bool is_settled = lane.completed == lane.received;
    if (lane.is_empty) {
        if (!is_settled) return;
        lane.state = Lane::State::kDetaching;
        connection_.detach(handle);
    } else if (more * 2 >= options_.credit) {
        lane.granted += more;
        connection_.grant(handle, lane.received, lane.granted - lane.received);
    } else if (is_settled && lane.received != lane.first && !options_.holds_sessions) {
        lane.is_draining = true;
        connection_.grant(handle, lane.received, lane.granted - lane.received, true);
    }
}

void SessionReceiver::on_transfer(const wire::Performative& transfer, std::uint64_t now) {
    Lane* lane = lane_of(transfer.u32(0));
    if (lane == nullptr || transfer.fields[5].number == 1)
        throw wire::ProtocolError("a transfer of a foreign link or of several frames");
    note_first_frame(transfer, now);
    tally_.body_bytes += transfer.payload_size;
    ++tally_.received;
    if (++lane->received == lane->granted) lane->is_draining = false;
    const std::uint32_t id = transfer.u32(1);
    if (lane_by_delivery_.empty()) first_delivery_id_ = id;
    if (id - first_delivery_id_ != lane_by_delivery_.size())
        throw wire::ProtocolError("delivery ids with gaps");
    const auto index = static_cast<std::size_t>(lane - lanes_.data());
    lane_by_delivery_.push_back(static_cast<std::uint16_t>(index));
    queue_disposition(id, id);
    if (!options_.confirms_settlement) {
        ++lane->completed;
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
        const std::size_t index = lane_by_delivery_.at(id - first_delivery_id_);
        ++lanes_[index].completed;
        take_up(index);
    }
    count_completed(std::uint64_t{last - first} + 1, now);
}

// A drain is answered by counting up the credit that was not used: then there is nothing more.
void SessionReceiver::on_flow(const wire::Performative& flow) {
    Lane* lane = lane_of(flow.u32(4));
    if (lane == nullptr || !lane->is_draining || flow.u32(5) != lane->granted) return;
    lane->is_draining = false;
    lane->is_empty = lane->received != lane->granted;
    take_up(static_cast<std::size_t>(lane - lanes_.data()));
}

// Our own detach is answered, or no session came in time.
void SessionReceiver::on_detach(const wire::Performative& detach) {
    Lane* lane = lane_of(detach.u32(0));
    if (lane == nullptr) throw wire::ProtocolError("detach of a foreign link");
    by_remote_[detach.u32(0)] = kNoLane;
    const auto index = static_cast<std::size_t>(lane - lanes_.data());
    if (lane->state == Lane::State::kHeld)
        return connection_.fail("session lost: " + wire::describe_error(detach.fields[2]));
    if (lane->state == Lane::State::kAttaching)
        connection_.detach(static_cast<std::uint32_t>(index));
    attach(index);
}

SessionReceiver::Lane* SessionReceiver::lane_of(std::uint32_t remote_handle) {
    if (remote_handle >= by_remote_.size() || by_remote_[remote_handle] == kNoLane) return nullptr;
    return &lanes_[by_remote_[remote_handle]];
}
