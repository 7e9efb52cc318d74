#include "link.hpp"

#include <algorithm>

// ---- one link --------------------------------------------------------------------------------

std::uint32_t Link::start_delivery(std::uint64_t due_ns) {
    const std::uint32_t id = set_.outgoing_.next_id();
    set_.outgoing_.add({this, due_ns});
    ++delivery_count_;
    return id;
}

void Link::grant(std::uint64_t received, std::uint64_t credit) {
    connection().grant(handle_, delivery_count_ + static_cast<std::uint32_t>(received),
                       static_cast<std::uint32_t>(credit));
}

// ---- deliveries ------------------------------------------------------------------------------

void Unsettled::clear(std::uint32_t next_id) {
    entries_.clear();
    first_ = next_id;
}

Unsettled::Delivery Unsettled::take(std::uint32_t id) {
    const std::uint32_t index = id - first_;
    if (index >= entries_.size()) return {};
    const Delivery taken = entries_[index];
    entries_[index].link = nullptr;
    while (!entries_.empty() && entries_.front().link == nullptr) {
        entries_.pop_front();
        ++first_;
    }
    return taken;
}

// ---- all links of a connection ---------------------------------------------------------------

Link& LinkSet::add(LinkSpec spec, LinkHandler& handler) {
    const auto handle = static_cast<std::uint32_t>(links_.size());
    links_.push_back(std::make_unique<Link>(*this, std::move(spec), handle, handler));
    return *links_.back();
}

void LinkSet::on_opened() {
    by_remote_.clear();
    outgoing_.clear(0);
    has_incoming_ = false;
    for (const auto& link : links_) {
        link->is_attached_ = false;
        link->delivery_count_ = link->limit_ = 0;
        connection_.attach(link->handle_, link->spec_);
    }
}

void LinkSet::on_attach(const wire::Performative& attach) {
    const auto name = attach.fields[0].text();
    const auto found = std::find_if(links_.begin(), links_.end(),
                                    [&](const auto& link) { return link->spec_.name == name; });
    if (found == links_.end()) throw wire::ProtocolError("attach of a link nobody asked for");
    Link& link = **found;
    const std::uint32_t remote = attach.u32(1);
    if (remote > wire::kHandleMax) throw wire::ProtocolError("handle out of bounds");
    if (by_remote_.size() <= remote) by_remote_.resize(remote + 1, nullptr);
    by_remote_[remote] = &link;
    // A refused link is attached without its terminus, then detached with the reason.
    if (attach.fields[link.spec_.is_sender ? 6 : 5].is_null()) return;
    if (!link.spec_.is_sender) link.delivery_count_ = attach.u32(9);
    link.is_attached_ = true;
    link.handler_.on_attached();
}

void LinkSet::on_flow(const wire::Performative& flow) {
    Link& link = by_remote(flow.u32(4));
    if (!link.spec_.is_sender || flow.fields[6].is_null()) return;
    link.limit_ = flow.u32(5) + flow.u32(6);
    link.handler_.on_credit();
}

void LinkSet::on_transfer(const wire::Performative& transfer, std::uint64_t now) {
    Link& link = by_remote(transfer.u32(0));
    if (options_.confirms_settlement) note_incoming(link, transfer);
    link.handler_.on_transfer(transfer, now);
}

void LinkSet::note_incoming(Link& link, const wire::Performative& transfer) {
    // Only the first frame of a delivery has to name it.
    if (transfer.fields[1].is_null()) return;
    const std::uint32_t id = transfer.u32(1);
    if (!has_incoming_) incoming_.clear(id);
    has_incoming_ = true;
    if (id + 1 == incoming_.next_id()) return;  // a later frame that names it all the same
    if (id != incoming_.next_id()) throw wire::ProtocolError("delivery ids with gaps");
    const bool is_presettled = transfer.fields[4].number == 1;
    incoming_.add({&link, 0});
    if (is_presettled) incoming_.take(id);
}

void LinkSet::on_disposition(const wire::Performative& disposition, std::uint64_t now) {
    const bool is_about_sent = disposition.fields[0].number == 1;
    const bool is_settled = disposition.fields[3].number == 1;
    const std::uint64_t state = disposition.fields[4].descriptor;
    const bool is_outcome = state >= wire::kAccepted && state <= wire::kModified;
    if (!is_settled && !(is_about_sent && is_outcome)) return;
    Unsettled& unsettled = is_about_sent ? outgoing_ : incoming_;
    const std::uint32_t first = disposition.u32(1);
    std::uint32_t last = disposition.fields[2].is_null() ? first : disposition.u32(2);
    if (static_cast<std::int32_t>(last - unsettled.next_id()) >= 0) last = unsettled.next_id() - 1;
    for (std::uint32_t id = first; static_cast<std::int32_t>(last - id) >= 0; ++id) {
        const Unsettled::Delivery delivery = unsettled.take(id);
        if (delivery.link == nullptr) continue;
        delivery.link->handler_.on_settled(disposition, delivery.due_ns, now);
    }
}

void LinkSet::on_detach(const wire::Performative& detach) {
    connection_.fail("detached: " + wire::describe_error(detach.fields[2]));
}

void LinkSet::on_closed(const std::string& reason) {
    for (const auto& link : links_) link->handler_.on_closed(reason);
}

Link& LinkSet::by_remote(std::uint32_t handle) const {
    if (handle >= by_remote_.size() || by_remote_[handle] == nullptr)
        throw wire::ProtocolError("a frame of a link that is not attached");
    return *by_remote_[handle];
}
