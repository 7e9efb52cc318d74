#include "crowd.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "histogram.hpp"
#include "link.hpp"
#include "message.hpp"
#include "report.hpp"

namespace {

// Idle connections are opened so many at a time; a storm knows no such manners.
constexpr std::size_t kOpeningAtOnce = 100;
constexpr std::uint64_t kFirstRetryNs = 100'000'000;
constexpr std::uint64_t kLongestRetryNs = 2'000'000'000;

void raise_file_limit() {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

// One client of the crowd: connects, and when it is a sender gets one message accepted.
class Member : public LinkHandler {
  public:
    Member(const Options& options, std::size_t index, bool is_sender)
        : options_(options),
          is_sender_(is_sender),
          name_("crowd-" + std::to_string(getpid()) + "-" + std::to_string(index)),
          links_(options, name_),
          link_(links_.add({name_, options.addresses[index % options.addresses.size()], is_sender},
                           *this)) {}

    void connect(int epoll_fd, std::uint64_t token, std::uint64_t now) {
        if (start_ns_ == 0) start_ns_ = now;
        ++attempts_;
        is_served_ = has_sent_ = false;
        retry_ns_ = 0;
        connection().connect(epoll_fd, token);
    }

    void on_attached() override {
        if (is_sender_) return;
        link_.grant(0, options_.credit);
        is_served_ = true;
    }

    void on_credit() override {
        if (has_sent_ || link_.credit() == 0) return;
        EncodedMessage message(options_, link_.handle(), 65536);
        const std::uint64_t now = now_ns();
        message.patch(link_.start_delivery(now), Stamp{0, now}, 0);
        const auto& frame = message.frames().front();
        connection().queue(message.data() + frame.offset, frame.size);
        connection().count_transfer_sent();
        has_sent_ = true;
    }

    void on_settled(const wire::Performative& disposition, std::uint64_t,
                    std::uint64_t now) override {
        if (disposition.fields[4].descriptor != wire::kAccepted) return;
        is_served_ = true;
        served_ns_ = now;
    }

    void on_closed(const std::string&) override {
        is_served_ = false;
        retry_ns_ = now_ns() + std::min(kFirstRetryNs << std::min(attempts_, 5u), kLongestRetryNs);
    }

    void forget() {
        connection().abandon();
        start_ns_ = 0;
        attempts_ = 0;
        is_served_ = false;
    }

    bool wants_retry(std::uint64_t now) const { return retry_ns_ != 0 && now >= retry_ns_; }
    bool is_served() const { return is_served_; }
    std::uint64_t waited_ns() const { return served_ns_ - start_ns_; }
    std::uint32_t attempts() const { return attempts_; }
    Connection& connection() { return links_.connection(); }

  private:
    const Options& options_;
    const bool is_sender_;
    const std::string name_;
    LinkSet links_;
    Link& link_;
    bool is_served_ = false;
    bool has_sent_ = false;
    std::uint32_t attempts_ = 0;
    std::uint64_t start_ns_ = 0;
    std::uint64_t served_ns_ = 0;
    std::uint64_t retry_ns_ = 0;
};

class Crowd {
  public:
    Crowd(const Options& options, bool are_senders)
        : options_(options), epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {
        raise_file_limit();
        for (std::size_t i = 0; i < options.connections; ++i)
            members_.push_back(std::make_unique<Member>(options, i, are_senders));
    }
    ~Crowd() { ::close(epoll_fd_); }

    // Connects everyone, at most `at_once` unserved at a time, and retries refused ones.
    bool serve_all(std::size_t at_once) {
        const std::uint64_t limit =
            now_ns() + static_cast<std::uint64_t>(options_.limit_s * 1e9);
        std::size_t started = 0;
        while (served() < members_.size()) {
            const std::uint64_t now = now_ns();
            if (now > limit) return false;
            for (; started < members_.size() && started - served() < at_once; ++started)
                members_[started]->connect(epoll_fd_, started, now);
            for (std::size_t i = 0; i < started; ++i)
                if (members_[i]->wants_retry(now)) members_[i]->connect(epoll_fd_, i, now);
            wait(50);
        }
        return true;
    }

    void wait(int timeout_ms) {
        epoll_event events[256];
        const int ready = epoll_wait(epoll_fd_, events, 256, timeout_ms);
        const std::uint64_t now = now_ns();
        for (int i = 0; i < ready; ++i) {
            Member& member = *members_[events[i].data.u64];
            const bool was_served = member.is_served();
            member.connection().on_event(events[i].events, now);
            if (member.is_served() != was_served) served_ += member.is_served() ? 1 : -1;
        }
    }

    void keep_alive() {
        const std::uint64_t now = now_ns();
        for (const auto& member : members_) member->connection().keep_alive(now);
    }

    void forget_all() {
        for (const auto& member : members_) member->forget();
        served_ = 0;
    }

    void close_all() {
        for (const auto& member : members_) member->connection().close();
        for (int round = 0; round < 20; ++round) wait(50);
    }

    std::size_t served() const { return static_cast<std::size_t>(served_); }
    const std::vector<std::unique_ptr<Member>>& members() const { return members_; }

    std::string first_failure() const {
        for (const auto& member : members_)
            if (const auto& failure = member->connection().failure(); !failure.empty())
                return failure;
        return "";
    }

  private:
    const Options& options_;
    const int epoll_fd_;
    std::vector<std::unique_ptr<Member>> members_;
    std::int64_t served_ = 0;
};

double seconds_since(std::uint64_t start) { return static_cast<double>(now_ns() - start) / 1e9; }

}  // namespace

int run_idle(const Options& options) {
    Crowd crowd(options, false);
    const std::uint64_t start = now_ns();
    const bool all_stand = crowd.serve_all(kOpeningAtOnce);
    Report report;
    report.add("mode", std::string("idle"));
    report.add("connections", std::uint64_t{crowd.served()});
    report.add("failure", crowd.first_failure());
    report.add("elapsed_s", seconds_since(start));
    report.print();
    if (!all_stand) return 1;
    std::uint64_t keep_alive_ns = now_ns();
    for (pollfd input{STDIN_FILENO, POLLIN, 0}; poll(&input, 1, 0) == 0;) {
        crowd.wait(200);
        if (seconds_since(keep_alive_ns) < 1) continue;
        keep_alive_ns = now_ns();
        crowd.keep_alive();
    }
    const bool all_lived = crowd.served() == options.connections;
    if (!all_lived) std::fprintf(stderr, "lost: %s\n", crowd.first_failure().c_str());
    crowd.close_all();
    return all_lived ? 0 : 1;
}

int run_storm(const Options& options) {
    Crowd crowd(options, true);
    Report report;
    report.add("mode", std::string("storm"));
    std::uint64_t start = now_ns();
    bool all_served = crowd.serve_all(kOpeningAtOnce);
    report.add("first_connect_s", seconds_since(start));
    if (all_served) {
        crowd.forget_all();
        start = now_ns();
        all_served = crowd.serve_all(options.connections);
    }
    const double elapsed_s = seconds_since(start);
    Histogram waited;
    std::uint64_t attempts = 0;
    for (const auto& member : crowd.members()) {
        attempts += member->attempts();
        if (member->is_served()) waited.add(member->waited_ns());
    }
    report.add("connections", std::uint64_t{options.connections});
    report.add("served", std::uint64_t{crowd.served()});
    report.add("attempts", attempts);
    report.add("failure", crowd.first_failure());
    report.add("elapsed_s", elapsed_s);
    report.add_latency("served", waited);
    report.print();
    crowd.close_all();
    return all_served ? 0 : 1;
}
