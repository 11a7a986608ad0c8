// A fixed team of threads, including the caller, that divide loops among themselves. After a loop the other threads spin briefly, because a
// step's next loop follows within microseconds, then sleep. With a smaller width, members beyond it sleep and use no processor.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace upbeat {

class Team {
  public:
    explicit Team(int threads) : count_(threads), width_(threads) {
        for (int i = 1; i < threads; i++) members_.push_back(std::make_unique<Member>());
        for (int i = 1; i < threads; i++) members_[i - 1]->thread = std::thread([this, i] { follow(i); });
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            ending_ = true;
            round_.fetch_add(ROUND);
        }
        for (auto& m : members_) m->wake.notify_one();
        for (auto& m : members_) m->thread.join();
    }

    int count() const { return count_; }

    // From now on the first `width` members take part: 1 to count(). Called on the thread that calls split.
    void use(int width) { width_ = width < 1 ? 1 : width > count_ ? count_ : width; }

    // Calls work(i) for every i in [0, items), in any order, on the members that take part; returns when all are done. One caller at a time.
    template <typename Work>
    void split(int items, const Work& work) {
        if (width_ == 1 || items <= 1) {
            for (int i = 0; i < items; i++) work(i);
            return;
        }
        std::function<void(int)> call = [&work](int i) { work(i); };
        work_ = &call;
        items_ = items;
        next_.store(0, std::memory_order_relaxed);
        busy_.store(width_ - 1, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> hold(mutex_);
            round_.store((round_.load(std::memory_order_relaxed) / ROUND + 1) * ROUND + uint64_t(width_), std::memory_order_release);
        }
        for (int i = 1; i < width_; i++) members_[i - 1]->wake.notify_one();
        take();
        for (int spins = 0; busy_.load(std::memory_order_acquire); spins++) {
            if (spins > SPINS) std::this_thread::yield();
        }
    }

  private:
    static constexpr int SPINS = 20000;
    // A round's number, with its width in the lowest bits. Members read both at once, so that none joins a later round with an earlier round's
    // width.
    static constexpr uint64_t ROUND = 1024;

    struct Member {
        std::thread thread;
        std::condition_variable wake;
    };

    void take() {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) (*work_)(i);
    }

    void follow(int me) {
        uint64_t seen = 0;
        for (;;) {
            // A member that did not take part in the last round sleeps at once.
            const int most = int(seen % ROUND) > me ? SPINS : 0;
            auto mine = [&] {
                const uint64_t now = round_.load(std::memory_order_acquire);
                return ending_ || (now / ROUND != seen / ROUND && int(now % ROUND) > me);
            };
            int spins = 0;
            while (!mine() && spins < most) spins++;
            if (!mine()) {
                std::unique_lock<std::mutex> hold(mutex_);
                members_[me - 1]->wake.wait(hold, mine);
            }
            if (ending_) return;
            seen = round_.load(std::memory_order_acquire);
            take();
            busy_.fetch_sub(1, std::memory_order_release);
        }
    }

    const int count_;
    int width_;
    std::vector<std::unique_ptr<Member>> members_;
    std::mutex mutex_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int> next_{0}, busy_{0};
    int items_ = 0;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<bool> ending_{false};
};

}  // namespace upbeat
