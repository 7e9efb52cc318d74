#include "traffic.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "link.hpp"
#include "receiver.hpp"
#include "report.hpp"
#include "sender.hpp"
#include "session_receiver.hpp"

namespace {

constexpr double kHandshakeLimitS = 30;
constexpr double kGoodbyeLimitS = 5;
// Numbers of messages identify their sender.
constexpr int kSenderShift = 40;

std::uint64_t from_seconds(double seconds) { return static_cast<std::uint64_t>(seconds * 1e9); }

class Traffic {
  public:
    explicit Traffic(const Options& options);
    ~Traffic() { ::close(epoll_fd_); }
    int run();

  private:
    void add_links(const std::string& address, std::uint64_t quota, double rate);
    void add_sender(const LinkSpec& spec, std::uint64_t quota, double rate);
    void add_receiver(const LinkSpec& spec, std::uint64_t quota);
    LinkSet& place(std::vector<std::unique_ptr<LinkSet>>& sets, std::size_t index,
                   const std::string& name);
    bool connect_all();
    bool has_credit_everywhere() const;
    void transfer_all();
    void say_goodbye();
    void wait(std::uint64_t timeout_ns);
    std::uint64_t patience_ns(std::uint64_t now) const;
    std::uint64_t progress() const;
    bool is_done() const;
    std::string failure() const;
    void report(double cpu_s) const;
    void report_sending(Report& report) const;
    void report_receiving(Report& report) const;

    const Options& options_;
    const int epoll_fd_;
    std::uint64_t run_id_;
    std::vector<std::unique_ptr<LinkSet>> outgoing_;
    std::vector<std::unique_ptr<LinkSet>> incoming_;
    std::vector<std::unique_ptr<Sender>> senders_;
    std::vector<std::unique_ptr<Receiving>> receivers_;
    std::vector<Connection*> connections_;  // by epoll token
    std::uint64_t start_ns_ = 0;
    std::uint64_t stop_ns_ = 0;
    const char* ending_ = "complete";
};

Traffic::Traffic(const Options& options)
    : options_(options), epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {
    run_id_ = (std::uint64_t{std::random_device{}()} << 32) | 1u;
    // The quota is divided evenly; the first links take what remains.
    const std::uint64_t links = options.addresses.size() * options.connections;
    std::uint64_t index = 0;
    for (std::uint32_t round = 0; round < options.connections; ++round) {
        for (const std::string& address : options.addresses) {
            const std::uint64_t quota =
                options.count / links + (index < options.count % links ? 1 : 0);
            if (quota != 0) add_links(address, quota, options.rate / static_cast<double>(links));
            ++index;
        }
    }
}

void Traffic::add_links(const std::string& address, std::uint64_t quota, double rate) {
    const std::string name =
        "load-" + std::to_string(getpid()) + "-" +
        std::to_string(std::max(senders_.size(), receivers_.size()));
    if (options_.mode != Mode::kReceive) add_sender({name + "-out", address, true}, quota, rate);
    if (options_.mode == Mode::kSend) return;
    const bool is_elsewhere = options_.mode == Mode::kBoth && !options_.receive_address.empty();
    add_receiver({name + "-in", is_elsewhere ? options_.receive_address : address, false}, quota);
}

void Traffic::add_sender(const LinkSpec& spec, std::uint64_t quota, double rate) {
    const std::size_t index = senders_.size();
    senders_.push_back(std::make_unique<Sender>(options_, place(outgoing_, index, spec.name), spec,
                                                quota, rate, run_id_,
                                                std::uint64_t{index} << kSenderShift));
}

void Traffic::add_receiver(const LinkSpec& spec, std::uint64_t quota) {
    if (options_.session_links == 0) {
        LinkSet& links = place(incoming_, receivers_.size(), spec.name);
        receivers_.push_back(std::make_unique<Receiver>(options_, links, spec, quota, run_id_));
    } else {
        receivers_.push_back(std::make_unique<SessionReceiver>(options_, spec, quota, run_id_));
        connections_.push_back(&receivers_.back()->connection());
    }
}

// The connection of a direction's link of that index: its own, or the next of the shared ones.
LinkSet& Traffic::place(std::vector<std::unique_ptr<LinkSet>>& sets, std::size_t index,
                        const std::string& name) {
    const std::size_t at = options_.shared == 0 ? index : index % options_.shared;
    if (at == sets.size()) {
        sets.push_back(std::make_unique<LinkSet>(options_, name));
        connections_.push_back(&sets.back()->connection());
    }
    return *sets[at];
}

int Traffic::run() {
    if (!connect_all()) {
        std::fprintf(stderr, "postbus-load: %s\n", failure().c_str());
        return 2;
    }
    const double cpu_before = own_cpu_s();
    transfer_all();
    const double cpu_s = own_cpu_s() - cpu_before;
    say_goodbye();
    report(cpu_s);
    return is_done() ? 0 : 1;
}

// ---- phases ----------------------------------------------------------------------------------

bool Traffic::connect_all() {
    for (std::size_t token = 0; token < connections_.size(); ++token)
        connections_[token]->connect(epoll_fd_, token);
    const std::uint64_t limit = now_ns() + from_seconds(kHandshakeLimitS);
    while (!has_credit_everywhere()) {
        if (!failure().empty() || now_ns() > limit) return false;
        wait(from_seconds(0.1));
    }
    return true;
}

// The clock starts when every link stands and every sender may send.
bool Traffic::has_credit_everywhere() const {
    for (const Connection* connection : connections_)
        if (!connection->is_ready()) return false;
    const auto may_send = [](const auto& sender) { return sender->has_credit(); };
    const auto is_attached = [](const auto& receiver) { return receiver->is_attached(); };
    return std::all_of(senders_.begin(), senders_.end(), may_send) &&
           std::all_of(receivers_.begin(), receivers_.end(), is_attached);
}

void Traffic::transfer_all() {
    start_ns_ = now_ns();
    for (const auto& sender : senders_) sender->start(start_ns_);
    std::uint64_t last_progress = 0;
    std::uint64_t progress_ns = start_ns_;
    std::uint64_t keep_alive_ns = start_ns_;
    for (;;) {
        const std::uint64_t now = now_ns();
        bool can_continue = false;
        for (const auto& sender : senders_) sender->pump(now);
        for (const auto& receiver : receivers_) receiver->pump();
        for (Connection* connection : connections_) {
            const bool was_full = connection->is_full();
            connection->flush();
            can_continue |= was_full && connection->queued_bytes() == 0;
        }
        stop_ns_ = now;
        if (is_done()) return;
        if (progress() != last_progress) {
            last_progress = progress();
            progress_ns = now;
        }
        ending_ = !failure().empty()                                        ? "failed"
                  : now - start_ns_ > from_seconds(options_.limit_s)        ? "limit"
                  : now - progress_ns > from_seconds(options_.quiet_s)      ? "quiet"
                                                                            : "complete";
        if (ending_[0] != 'c') return;
        if (now - keep_alive_ns > from_seconds(1)) {
            keep_alive_ns = now;
            for (Connection* connection : connections_) connection->keep_alive(now);
        }
        wait(can_continue ? 0 : patience_ns(now));
    }
}

// Until the next message of an open loop is due, rounded up to the pace; else a while.
std::uint64_t Traffic::patience_ns(std::uint64_t now) const {
    std::uint64_t patience = from_seconds(0.25);
    for (const auto& sender : senders_) {
        const std::uint64_t due = sender->next_due_ns();
        if (due == 0) continue;
        const std::uint64_t until = due > now ? due - now : 0;
        const auto pace = static_cast<std::uint64_t>(options_.pace_us * 1e3);
        patience = std::min(patience, std::max(until, pace));
    }
    return patience;
}

// The answer to a close means that the broker has read all settlements before it.
void Traffic::say_goodbye() {
    for (Connection* connection : connections_) connection->close();
    const std::uint64_t limit = now_ns() + from_seconds(kGoodbyeLimitS);
    const auto is_closed = [](const Connection* connection) { return connection->is_closed(); };
    while (!std::all_of(connections_.begin(), connections_.end(), is_closed) && now_ns() < limit)
        wait(from_seconds(0.1));
}

void Traffic::wait(std::uint64_t timeout_ns) {
    epoll_event events[64];
    const timespec timeout{static_cast<time_t>(timeout_ns / 1000000000u),
                           static_cast<long>(timeout_ns % 1000000000u)};
    const int ready = epoll_pwait2(epoll_fd_, events, 64, &timeout, nullptr);
    if (ready <= 0) return;
    const std::uint64_t now = now_ns();
    for (int i = 0; i < ready; ++i)
        connections_[events[i].data.u64]->on_event(events[i].events, now);
}

// ---- results ---------------------------------------------------------------------------------

std::uint64_t Traffic::progress() const {
    std::uint64_t sum = 0;
    for (const auto& sender : senders_) sum += sender->tally().sent + sender->settled();
    for (const auto& receiver : receivers_)
        sum += receiver->tally().body_bytes + receiver->tally().completed;
    return sum;
}

bool Traffic::is_done() const {
    return std::all_of(senders_.begin(), senders_.end(), [](auto& s) { return s->is_done(); }) &&
           std::all_of(receivers_.begin(), receivers_.end(), [](auto& r) { return r->is_done(); });
}

std::string Traffic::failure() const {
    for (const Connection* connection : connections_)
        if (!connection->failure().empty()) return connection->failure();
    return "";
}

void Traffic::report(double cpu_s) const {
    Report report;
    const char* modes[] = {"send", "receive", "both"};
    report.add("mode", std::string(modes[static_cast<int>(options_.mode)]));
    report.add("ending", std::string(ending_));
    report.add("failure", failure());
    report.add("count", options_.count);
    report.add("size", std::uint64_t{options_.body_bytes});
    report.add("connections", std::uint64_t{connections_.size()});
    report.add("links", std::uint64_t{senders_.size() + receivers_.size()});
    if (!senders_.empty()) report_sending(report);
    if (!receivers_.empty()) report_receiving(report);
    report.add("elapsed_s", static_cast<double>(stop_ns_ - start_ns_) / 1e9);
    report.add("client_cpu_s", cpu_s);
    report.add("client_cpu_us_per_message", cpu_s * 1e6 / static_cast<double>(options_.count));
    report.print();
}

void Traffic::report_sending(Report& report) const {
    Sender::Tally sum;
    Histogram latency;
    std::uint64_t end_ns = 0;
    std::string refusal;
    for (const auto& sender : senders_) {
        sum.sent += sender->tally().sent;
        sum.accepted += sender->tally().accepted;
        sum.rejected += sender->tally().rejected;
        sum.released += sender->tally().released;
        latency.merge(sender->latency());
        end_ns = std::max(end_ns, sender->is_done() ? sender->end_ns() : stop_ns_);
        if (refusal.empty()) refusal = sender->refusal();
    }
    const double seconds = static_cast<double>(end_ns - start_ns_) / 1e9;
    const double rate = static_cast<double>(sum.accepted) / seconds;
    report.add("window", std::uint64_t{options_.window});
    report.add("offered_rate", options_.rate);
    report.add("sent", sum.sent);
    report.add("accepted", sum.accepted);
    report.add("rejected", sum.rejected);
    report.add("released", sum.released);
    report.add("refusal", refusal);
    report.add("send_s", seconds);
    report.add("send_rate", rate);
    report.add("send_mb_per_s", rate * options_.body_bytes / 1e6);
    report.add_latency("ack", latency);
}

void Traffic::report_receiving(Report& report) const {
    Receiving::Tally sum;
    Histogram latency;
    std::uint64_t end_ns = 0;
    for (const auto& receiver : receivers_) {
        sum.received += receiver->tally().received;
        sum.completed += receiver->tally().completed;
        sum.strays += receiver->tally().strays;
        sum.body_bytes += receiver->tally().body_bytes;
        sum.sessions += receiver->tally().sessions;
        latency.merge(receiver->latency());
        end_ns = std::max(end_ns, receiver->is_done() ? receiver->end_ns() : stop_ns_);
    }
    const double seconds = static_cast<double>(end_ns - start_ns_) / 1e9;
    report.add("credit", std::uint64_t{options_.credit});
    report.add("settle_range", std::uint64_t{options_.settle_range});
    report.add("confirms_settlement", options_.confirms_settlement);
    report.add("received", sum.received);
    report.add("completed", sum.completed);
    report.add("strays", sum.strays);
    if (options_.session_links != 0) report.add("sessions_accepted", sum.sessions);
    report.add("receive_s", seconds);
    report.add("receive_rate", static_cast<double>(sum.completed) / seconds);
    report.add("receive_mb_per_s", static_cast<double>(sum.body_bytes) / seconds / 1e6);
    report.add_latency("end_to_end", latency);
}

}  // namespace

int run_traffic(const Options& options) { return Traffic(options).run(); }
