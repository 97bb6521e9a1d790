timeout 60 python3 -m tools.benchmark._try2 check 2>&1 | grep -E "ok|rror" | head -20 
timeout 110 python3 -m tools.benchmark._try2 sweep 2>&1 | grep SWEEP
timeout 100 python3 -m tools.benchmark._try prof 2>&1 | grep -v Warn | head -40
