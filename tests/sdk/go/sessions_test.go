package sdk

import (
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

func TestANamedSession(t *testing.T) {
	client := connect(t, overTLS, once)
	send(t, client, "sessions-1", inSession("a", "a1"), inSession("a", "a2"), inSession("b", "b1"))
	session := must(client.AcceptSessionForQueue(within(t, long), "sessions-1", "a", nil))(t)
	equal(t, session.SessionID(), "a")
	until := session.LockedUntil()
	if !until.After(time.Now()) {
		t.Fatal(until)
	}
	equal(t, len(must(session.GetSessionState(within(t, long), nil))(t)), 0)
	ok(t, session.SetSessionState(within(t, long), []byte("half way"), nil))
	equal(t, string(must(session.GetSessionState(within(t, long), nil))(t)), "half way")
	equal(t, bodies(must(session.PeekMessages(within(t, long), 10, nil))(t)), "a1 a2")

	got := receive(t, session, 2)
	equal(t, bodies(got), "a1 a2")
	ok(t, session.DeferMessage(within(t, long), got[0], nil))
	ok(t, session.DeadLetterMessage(within(t, long), got[1], nil))
	numbers := []int64{*got[0].SequenceNumber}
	deferred := must(session.ReceiveDeferredMessages(within(t, long), numbers, nil))(t)[0]
	ok(t, session.AbandonMessage(within(t, long), deferred, nil))
	again := must(session.ReceiveDeferredMessages(within(t, long), numbers, nil))(t)[0]
	ok(t, session.CompleteMessage(within(t, long), again, nil))
	nothing(t, session)

	advance(t, "PT30S")
	ok(t, session.RenewSessionLock(within(t, long), nil))
	if session.LockedUntil().Sub(until) < 30*time.Second {
		t.Fatal(session.LockedUntil())
	}
	ok(t, session.Close(within(t, long)))
	ofDead := must(client.NewReceiverForQueue("sessions-1", dead))(t)
	equal(t, bodies(receive(t, ofDead, 1)), "a2")
}

func TestTheNextSessionThatIsFreeOrNoneInTime(t *testing.T) {
	client := connect(t, overTLS, once)
	send(t, client, "sessions-2", inSession("only", "1"))
	session := must(client.AcceptNextSessionForQueue(within(t, long), "sessions-2", nil))(t)
	equal(t, session.SessionID(), "only")
	if _, err := client.AcceptNextSessionForQueue(within(t, 2*time.Second), "sessions-2", nil); err == nil {
		t.Fatal("there was no other session")
	}
	_, err := client.AcceptSessionForQueue(within(t, long), "sessions-2", "only", nil)
	if err == nil {
		t.Fatal("a session has one receiver")
	}
	received := receive(t, session, 1)[0]
	advance(t, "PT61S")
	// The link was detached with the lock; the SDK tries it until its patience ends.
	if session.CompleteMessage(within(t, time.Second), received, nil) == nil {
		t.Fatal("the lock had expired")
	}
}

func TestSessionsAreListed(t *testing.T) {
	client := connect(t, overTLS, once)
	send(t, client, "sessions-3", inSession("one", "1"), inSession("two", "2"))
	send(t, client, "topic-1", inSession("three", "3"))
	queue := client.NewListSessionsForQueuePager("sessions-3", nil)
	subscription := client.NewListSessionsForSubscriptionPager("topic-1", "sessions", nil)
	found := 0
	for queue.More() {
		found += len(must(queue.NextPage(within(t, long)))(t).Sessions)
	}
	equal(t, found, 2)
	equal(t, must(subscription.NextPage(within(t, long)))(t).Sessions[0], "three")
}

func TestSubscriptions(t *testing.T) {
	client := connect(t, overTLS, once)
	send(t, client, "topic-2", inSession("s", "1"), inSession("s", "2"))
	receiver := must(client.NewReceiverForSubscription("topic-2", "all", nil))(t)
	got := receive(t, receiver, 2)
	equal(t, bodies(got), "1 2")
	options := &azservicebus.DeadLetterOptions{Reason: to.Ptr("why")}
	ok(t, receiver.DeadLetterMessage(within(t, long), got[0], options))
	ofDead := must(client.NewReceiverForSubscription("topic-2", "all", dead))(t)
	equal(t, *receive(t, ofDead, 1)[0].DeadLetterReason, "why")
	session := must(client.AcceptSessionForSubscription(within(t, long), "topic-2", "sessions", "s", nil))(t)
	equal(t, bodies(receive(t, session, 2)), "1 2")
	ok(t, session.Close(within(t, long)))
	next := must(client.AcceptNextSessionForSubscription(within(t, long), "topic-2", "sessions", nil))(t)
	equal(t, next.SessionID(), "s")
}
