// The thread that registers memory where that takes long (pinning): no transfer waits for it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace pdnode {

class Registrar {
 public:
  using Job = std::function<void()>;

  Registrar() = default;
  Registrar(const Registrar&) = delete;
  Registrar& operator=(const Registrar&) = delete;
  ~Registrar() { stop(); }

  void start();
  // In order. Jobs are as few as sessions and regions.
  void post(Job job);
  // Ends after the job that runs; those that wait are dropped. Idempotent.
  void stop();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace pdnode
