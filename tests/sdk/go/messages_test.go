package sdk

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

func wantCode(t *testing.T, err error, code azservicebus.Code) {
	t.Helper()
	var said *azservicebus.Error
	if !errors.As(err, &said) || said.Code != code {
		t.Fatalf("wanted %s, got %v", code, err)
	}
}

func TestAMessageKeepsEveryProperty(t *testing.T) {
	client := connect(t, overTLS, once)
	sent := &azservicebus.Message{
		Body:                  []byte("hello"),
		MessageID:             to.Ptr("id-1"),
		ContentType:           to.Ptr("text/plain"),
		CorrelationID:         to.Ptr("correlation"),
		Subject:               to.Ptr("subject"),
		To:                    to.Ptr("to"),
		ReplyTo:               to.Ptr("reply"),
		ReplyToSessionID:      to.Ptr("reply session"),
		PartitionKey:          to.Ptr("key"),
		TimeToLive:            to.Ptr(time.Hour),
		ApplicationProperties: map[string]any{"text": "x", "whole": int64(7), "part": 1.5, "flag": true},
	}
	send(t, client, "plain-1", sent)
	receiver := must(client.NewReceiverForQueue("plain-1", nil))(t)
	got := receive(t, receiver, 1)[0]
	again := got.Message()
	equal(t, string(again.Body), "hello")
	equal(t, *again.MessageID, "id-1")
	equal(t, *again.ContentType, *sent.ContentType)
	equal(t, *again.CorrelationID, *sent.CorrelationID)
	equal(t, *again.Subject, *sent.Subject)
	equal(t, *again.To, *sent.To)
	equal(t, *again.ReplyTo, *sent.ReplyTo)
	equal(t, *again.ReplyToSessionID, *sent.ReplyToSessionID)
	equal(t, *again.PartitionKey, *sent.PartitionKey)
	equal(t, *again.TimeToLive, time.Hour)
	equal(t, fmt.Sprint(got.ApplicationProperties), fmt.Sprint(sent.ApplicationProperties))
	equal(t, got.DeliveryCount, 1)
	equal(t, got.State, azservicebus.MessageStateActive)
	equal(t, got.ExpiresAt.Sub(*got.EnqueuedTime), time.Hour)
	ok(t, receiver.CompleteMessage(within(t, long), got, nil))
	nothing(t, receiver)
	ok(t, receiver.Close(within(t, long)))
}

func TestAnnotatedMessages(t *testing.T) {
	client := connect(t, overTLS, once)
	sender := must(client.NewSender("plain-2", nil))(t)
	receiver := must(client.NewReceiverForQueue("plain-2", deleting))(t)
	value := &azservicebus.AMQPAnnotatedMessage{Body: azservicebus.AMQPAnnotatedMessageBody{Value: "a value"}}
	ok(t, sender.SendAMQPAnnotatedMessage(within(t, long), value, nil))
	got := receive(t, receiver, 1)[0]
	equal(t, got.RawAMQPMessage.Body.Value.(string), "a value")
	if len(got.MessageID) != 32 {
		t.Fatalf("a message without an id got %q", got.MessageID)
	}
	at := time.Now().Add(48 * time.Hour)
	later := []*azservicebus.AMQPAnnotatedMessage{value}
	numbers := must(sender.ScheduleAMQPAnnotatedMessages(within(t, long), later, at, nil))(t)
	ok(t, sender.CancelScheduledMessages(within(t, long), numbers, nil))
}

func TestABatchIsFilledUpToItsLimitAndArrivesWhole(t *testing.T) {
	client := connect(t, overTLS, once)
	sender := must(client.NewSender("plain-3", nil))(t)
	batch := must(sender.NewMessageBatch(within(t, long), nil))(t)
	annotated := &azservicebus.AMQPAnnotatedMessage{
		Body: azservicebus.AMQPAnnotatedMessageBody{Data: [][]byte{[]byte("first")}},
	}
	ok(t, batch.AddAMQPAnnotatedMessage(annotated, nil))
	var err error
	for err == nil {
		err = batch.AddMessage(text(strings.Repeat("x", 10_000)), nil)
	}
	if !errors.Is(err, azservicebus.ErrMessageTooLarge) {
		t.Fatal(err)
	}
	if batch.NumMessages() < 20 || batch.NumBytes() > 256*1024 {
		t.Fatalf("%d messages, %d bytes", batch.NumMessages(), batch.NumBytes())
	}
	ok(t, sender.SendMessageBatch(within(t, long), batch, nil))
	receiver := must(client.NewReceiverForQueue("plain-3", deleting))(t)
	receive(t, receiver, int(batch.NumMessages()))
	nothing(t, receiver)
}

func TestAbandonDeferDeadLetterAndTheirProperties(t *testing.T) {
	client := connect(t, overTLS, once)
	send(t, client, "plain-4", text("work"))
	receiver := must(client.NewReceiverForQueue("plain-4", nil))(t)
	abandon := &azservicebus.AbandonMessageOptions{PropertiesToModify: map[string]any{"tries": "1"}}
	ok(t, receiver.AbandonMessage(within(t, long), receive(t, receiver, 1)[0], abandon))
	again := receive(t, receiver, 1)[0]
	equal(t, again.DeliveryCount, 2)
	equal(t, again.ApplicationProperties["tries"].(string), "1")
	postpone := &azservicebus.DeferMessageOptions{PropertiesToModify: map[string]any{"tries": "2"}}
	ok(t, receiver.DeferMessage(within(t, long), again, postpone))
	nothing(t, receiver)

	numbers := []int64{*again.SequenceNumber}
	deferred := must(receiver.ReceiveDeferredMessages(within(t, long), numbers, nil))(t)[0]
	equal(t, deferred.ApplicationProperties["tries"].(string), "2")
	equal(t, deferred.State, azservicebus.MessageStateDeferred)
	ok(t, receiver.DeadLetterMessage(within(t, long), deferred, &azservicebus.DeadLetterOptions{
		Reason:             to.Ptr("why"),
		ErrorDescription:   to.Ptr("because"),
		PropertiesToModify: map[string]any{"tries": "3"},
	}))
	_, err := receiver.ReceiveDeferredMessages(within(t, long), numbers, nil)
	wantCode(t, err, azservicebus.CodeNotFound)

	ofDead := must(client.NewReceiverForQueue("plain-4", dead))(t)
	got := receive(t, ofDead, 1)[0]
	equal(t, *got.DeadLetterReason, "why")
	equal(t, *got.DeadLetterErrorDescription, "because")
	equal(t, got.ApplicationProperties["tries"].(string), "3")
	ok(t, ofDead.CompleteMessage(within(t, long), got, nil))
	nothing(t, ofDead)
}

func TestSchedulesAppearInTimeAndCanBeCancelled(t *testing.T) {
	client := connect(t, overTLS, once)
	sender := must(client.NewSender("plain-5", nil))(t)
	receiver := must(client.NewReceiverForQueue("plain-5", nil))(t)
	inTwoHours := time.Now().Add(2 * time.Hour)
	three := []*azservicebus.Message{text("a"), text("b"), text("c")}
	numbers := must(sender.ScheduleMessages(within(t, long), three, inTwoHours, nil))(t)
	ok(t, sender.CancelScheduledMessages(within(t, long), numbers[1:2], nil))
	err := sender.CancelScheduledMessages(within(t, long), numbers[1:2], nil)
	wantCode(t, err, azservicebus.CodeNotFound)
	waiting := must(receiver.PeekMessages(within(t, long), 10, nil))(t)
	equal(t, bodies(waiting), "a c")
	equal(t, waiting[0].State, azservicebus.MessageStateScheduled)
	advance(t, "PT3H")
	equal(t, bodies(receive(t, receiver, 2)), "a c")
}

func TestPeekGoesOnWhereItStoppedAndFromANumber(t *testing.T) {
	client := connect(t, overTLS, once)
	send(t, client, "plain-6", text("a"), text("b"), text("c"))
	receiver := must(client.NewReceiverForQueue("plain-6", nil))(t)
	first := must(receiver.PeekMessages(within(t, long), 1, nil))(t)[0]
	equal(t, bodies(must(receiver.PeekMessages(within(t, long), 5, nil))(t)), "b c")
	from := &azservicebus.PeekMessagesOptions{FromSequenceNumber: first.SequenceNumber}
	equal(t, bodies(must(receiver.PeekMessages(within(t, long), 2, from))(t)), "a b")
	equal(t, len(must(receiver.PeekMessages(within(t, long), 5, nil))(t)), 0)
}

func TestLocksAreRenewedExpireAndAreLost(t *testing.T) {
	client := connect(t, overTLS, once)
	send(t, client, "plain-7", text("held"))
	receiver := must(client.NewReceiverForQueue("plain-7", nil))(t)
	held := receive(t, receiver, 1)[0]
	until := *held.LockedUntil
	advance(t, "PT30S")
	ok(t, receiver.RenewMessageLock(within(t, long), held, nil))
	if held.LockedUntil.Sub(until) < 30*time.Second {
		t.Fatalf("renewed from %s to %s", until, held.LockedUntil)
	}
	advance(t, "PT61S")
	wantCode(t, receiver.CompleteMessage(within(t, long), held, nil), azservicebus.CodeLockLost)
	wantCode(t, receiver.RenewMessageLock(within(t, long), held, nil), azservicebus.CodeLockLost)
	again := receive(t, receiver, 1)[0]
	equal(t, again.DeliveryCount, 2)
	ok(t, receiver.CompleteMessage(within(t, long), again, nil))
}

func TestFailures(t *testing.T) {
	client := connect(t, overTLS, once)
	sender := must(client.NewSender("nowhere", nil))(t)
	wantCode(t, sender.SendMessage(within(t, long), text("x"), nil), azservicebus.CodeNotFound)
	receiver := must(client.NewReceiverForQueue("nowhere", nil))(t)
	_, err := receiver.ReceiveMessages(within(t, long), 1, nil)
	wantCode(t, err, azservicebus.CodeNotFound)
	for _, each := range []string{
		keyed("RootManageSharedAccessKey", "wrong"),
		keyed("nobody", "SAS_KEY_VALUE"),
		keyed("listener", "l1sten/+l1sten/+l1sten/+"),
	} {
		limited := must(connect(t, each, once).NewSender("plain-8", nil))(t)
		err := limited.SendMessage(within(t, long), text("x"), nil)
		wantCode(t, err, azservicebus.CodeUnauthorizedAccess)
	}
	send(t, connect(t, keyed("sender", "s3nd=s3nd=s3nd=s3nd="), once), "plain-8", text("allowed"))
	large := must(client.NewSender("plain-8", nil))(t)
	err = large.SendMessage(within(t, long), text(strings.Repeat("x", 300_000)), nil)
	if !errors.Is(err, azservicebus.ErrMessageTooLarge) {
		t.Fatal(err)
	}
	disabled := must(client.NewSender("disabled", nil))(t)
	if disabled.SendMessage(within(t, long), text("x"), nil) == nil {
		t.Fatal("a disabled queue took a message")
	}
}

func TestTheEmulatorsConnectionString(t *testing.T) {
	client := must(azservicebus.NewClientFromConnectionString(inClear, nil))(t)
	send(t, client, "plain-9", text("in clear"))
	receiver := must(client.NewReceiverForQueue("plain-9", deleting))(t)
	equal(t, bodies(receive(t, receiver, 1)), "in clear")
	ok(t, client.Close(within(t, long)))
	_, err := receiver.ReceiveMessages(within(t, soon), 1, nil)
	wantCode(t, err, azservicebus.CodeClosed)
}

func TestClientsGoOnAfterTheBrokerWasStoppedOrKilled(t *testing.T) {
	client := connect(t, overTLS, patient)
	sender := must(client.NewSender("plain-10", nil))(t)
	receiver := must(client.NewReceiverForQueue("plain-10", nil))(t)
	for _, how := range []string{"stop", "kill"} {
		ok(t, sender.SendMessage(within(t, long), text(how), nil))
		locked := receive(t, receiver, 1)[0]
		keep(t, "restart?how="+how)
		// The SDK tries the link that is gone until its patience ends.
		if receiver.CompleteMessage(within(t, time.Second), locked, nil) == nil {
			t.Fatal("the lock died with the broker")
		}
		again := receive(t, receiver, 1)[0]
		equal(t, string(again.Body), how)
		ok(t, receiver.CompleteMessage(within(t, long), again, nil))
		ok(t, sender.SendMessage(within(t, long), text("after"), nil))
		ok(t, receiver.CompleteMessage(within(t, long), receive(t, receiver, 1)[0], nil))
	}
	nothing(t, receiver)
}
